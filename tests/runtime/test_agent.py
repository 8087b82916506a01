"""An agent meets what nobody foresaw, and goes on: its threads are what saving hangs on."""

import errno
import threading
import uuid

import pytest

from raycheck.core import protocol
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.page import Plan
from raycheck.runtime import messages, storing, wire
from raycheck.runtime.agent import Agent
from raycheck.runtime.link import AgentLink
from raycheck.state.segment import Segment
from raycheck.store.objects import Store
from raycheck.store.run import RunStore
from tests.runtime.harness import wait_until

GENERATION = GenerationId(1, "0a1b2c3d")


class Once:
    """Raises at the first call and is what it stands for from then on."""

    def __init__(self, real, error):
        self.real, self.error = real, error
        self.has_fired = threading.Event()

    def __call__(self, *args, **kwargs):
        if self.has_fired.is_set():
            return self.real(*args, **kwargs)
        self.has_fired.set()
        raise self.error


class Node:
    """A real agent in this process, with one worker's link, and what it tells its coordinator."""

    def __init__(self, folder):
        self.address, self.told = f"raycheck-test-{uuid.uuid4().hex}", []
        self.agent = Agent(
            node="n",
            address=self.address,
            run_store=RunStore(Store(f"{folder}/run")),
            deliver=lambda delivery: self.told.extend(delivery.messages),
        )
        self.segment = Segment()
        self.segment.ensure(4096)
        self.link = None

    def connect(self):
        self.link = AgentLink(
            address=self.address,
            segments=[self.segment],
            generation=GENERATION,
            rank=0,
            world_size=1,
            on_reconnect=lambda: None,
        )

    def stage(self, plan):
        taken = {"stall_s": 0.0, "replica_digest": "", "metrics": {}}
        self.link.send("staged", plan=list(plan), num_bytes=4096, slot=0, **taken)

    def of(self, kind):
        return [message for message in self.told if isinstance(message, kind)]

    def close(self):
        if self.link is not None:
            self.link.close()
            # What a worker leaves behind is let go by the agent's end, if it has seen the worker's before.
            wait_until(lambda: not any(w.is_connected for w in self.agent._workers.values()), "its end")
        self.agent.close()
        for thread in self.agent._threads:
            thread.join(10)
            assert not thread.is_alive(), thread.name
        self.segment.close()


@pytest.fixture
def make_node(tmp_path):
    made = []

    def make():
        made.append(Node(tmp_path))
        return made[-1]

    yield make
    for node in made:
        node.close()


def test_a_worker_is_let_in_once_there_is_a_descriptor_for_it(make_node, monkeypatch, caplog):
    """No more open files are allowed, for a moment: later workers find the agent all the same."""

    class Listener:
        def __init__(self, real):
            self.shutdown, self.close = real.shutdown, real.close
            self.accept = Once(real.accept, OSError(errno.EMFILE, "Too many open files"))

    real = wire.listen
    listeners = []
    monkeypatch.setattr(
        wire, "listen", lambda address: listeners.append(Listener(real(address))) or listeners[0]
    )
    node = make_node()
    assert listeners[0].accept.has_fired.wait(60)
    node.connect()
    wait_until(lambda: node.of(messages.RankHere), "the rank")
    assert "could not be let in, yet: [Errno 24] Too many open files" in caplog.text


def test_an_upload_that_dies_of_something_else_than_storage_ends_its_attempt(make_node, monkeypatch):
    """No thread is allowed any more, for a moment: the coordinator hears of it, and the next one is stored."""
    failing = Once(storing.upload, RuntimeError("can't start new thread"))
    monkeypatch.setattr(storing, "upload", failing)
    node = make_node()
    node.connect()
    first, second = Plan(1, 10), Plan(2, 20)
    node.stage(first)
    (failed,) = wait_until(lambda: node.of(protocol.Failed), "the failure")
    assert failing.has_fired.is_set()
    assert failed == protocol.Failed(0, first.id, "can't start new thread")
    node.agent.obey(messages.AttemptEnded(first, False, failed.reason))
    node.stage(second)
    (durable,) = wait_until(lambda: node.of(protocol.Durable), "the next shard")
    assert durable.plan_id == second.id


def test_progress_goes_on_being_told(make_node, monkeypatch, caplog):
    """One beat fails; the next one tells."""
    node = make_node()
    failing = Once(node.agent._tell_steps, LookupError("a record that cannot be"))
    monkeypatch.setattr(node.agent, "_tell_steps", failing)
    node.connect()
    wait_until(lambda: node.of(messages.StepsMeasured), "progress")
    assert failing.has_fired.is_set()
    assert "a record that cannot be" in caplog.text


def test_a_worker_that_cannot_be_offered_anything_is_told(make_node, monkeypatch):
    """It would wait for an offer for ever."""
    node = make_node()
    failing = Once(node.agent._fetching._fetch_offer, RuntimeError("can't start new thread"))
    monkeypatch.setattr(node.agent._fetching, "_fetch_offer", failing)
    node.connect()
    wait_until(lambda: node.of(messages.RankHere), "the rank")
    node.agent.obey(messages.OfferRestore((0,), CheckpointRef(10, GENERATION, 1)))
    refusal = node.link.receive(60)
    assert failing.has_fired.is_set()
    assert refusal["op"] == "refuse"
    assert "can't start new thread" in refusal["message"]
