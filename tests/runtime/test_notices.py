"""Just in time: notices from their real sources, and what is saved because of them."""

import datetime
import http.server
import json
import os
import queue
import signal
import threading
import time
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core.notice import COMMIT_S, PERSIST_ROOM, Grace, Notice, last_start_s
from raycheck.core.page import Plan
from raycheck.runtime import messages
from raycheck.runtime.notices import DrainSource, Ec2Source, NoticeWatcher, sources_of_this_machine
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster, wait_until

# Deciding.

SECONDS = st.floats(0, 600)


@given(
    left_s=SECONDS,
    persist_s=st.floats(0, 100),
    step_s=st.floats(0, 30),
    lead_s=st.floats(0.1, 3),
    tick_s=st.floats(0.05, 1),
)
def test_one_checkpoint_at_once_and_one_that_is_durable_before_the_end(
    left_s, persist_s, step_s, lead_s, tick_s
):
    """At most two are asked for; the last as late as it may be, and none where it could not end in time."""
    grace = Grace(lead_s=lead_s)
    assert not grace.is_due(0.0, persist_s=persist_s, step_s=step_s)
    grace.hear(Notice("spot", left_s), 0.0)
    asked, now_s = [], 0.0
    for _ in range(2000):
        grace.hear(Notice("spot", max(left_s - now_s, 0.0)), now_s)
        if grace.is_due(now_s, persist_s=persist_s, step_s=step_s):
            asked.append(now_s)
        now_s += max(tick_s, left_s / 1900)
    assert asked[0] == 0.0
    assert len(asked) <= 2
    start_s = last_start_s(left_s, persist_s=persist_s, step_s=step_s, lead_s=lead_s)
    assert start_s + lead_s + 3 * step_s + PERSIST_ROOM * persist_s + COMMIT_S == pytest.approx(left_s)
    # None where it would have come while the first was under way.
    if len(asked) == 2:
        assert start_s <= asked[1] <= start_s + max(tick_s, left_s / 1900) + 1e-6
    else:
        assert start_s < lead_s + 3 * step_s + persist_s


@given(st.lists(st.tuples(st.sampled_from(["spot", "drain", "SIGTERM"]), st.none() | SECONDS), min_size=1))
def test_the_earliest_end_counts(told):
    """Whoever tells, and however often: an end that comes nearer asks anew, a later one changes nothing."""
    grace = Grace(lead_s=0.5)
    for source, left_s in told:
        grace.hear(Notice(source, left_s), 0.0)
    ends = [left_s for _, left_s in told if left_s is not None]
    assert (grace.deadline_s is None) == (not ends)
    if ends:
        assert min(ends) <= grace.deadline_s <= min(ends) + 2.0


def test_only_what_was_begun_after_the_notice_counts_as_saved():
    """A checkpoint that was under way before holds less than the notice left time for."""
    grace = Grace(lead_s=0.5)
    grace.hear(Notice("spot", 60.0), 10.0)
    grace.is_due(10.0, persist_s=1.0, step_s=0.1)
    grace.committed(9.0)
    assert not grace.was_saved
    grace.committed(10.0)
    assert grace.was_saved
    assert grace.covers(75.0)
    assert not grace.covers(3600.0), "long after the end that was told"


# Sources.


class Metadata(http.server.BaseHTTPRequestHandler):
    """What an EC2 instance's metadata service does, as far as it is documented."""

    paths: ClassVar[dict] = {}
    tokens: ClassVar[set] = set()
    seen: ClassVar[list] = []

    def do_PUT(self):
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        if self.path != "/latest/api/token" or ttl is None:
            return self._reply(400, "")
        token = f"token-{len(self.seen)}"
        self.tokens.add(token)
        return self._reply(200, token)

    def do_GET(self):
        self.seen.append(self.path)
        if self.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return self._reply(401, "")
        found = self.paths.get(self.path)
        return self._reply(404, "") if found is None else self._reply(200, json.dumps(found))

    def _reply(self, code, text):
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        """Nothing."""


@pytest.fixture
def metadata():
    kind = type("Mine", (Metadata,), {"paths": {}, "tokens": set(), "seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", kind
    server.shutdown()
    server.server_close()


SPOT = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


def test_spot_and_rebalance_notices_of_ec2(metadata):
    """With session tokens, renewed when they are not taken any more; nothing is announced until it is."""
    endpoint, service = metadata
    now = datetime.datetime(2031, 5, 1, 12, 0, tzinfo=datetime.timezone.utc).timestamp()
    source = Ec2Source(endpoint, now=lambda: now)
    assert source.ask() == []
    service.paths[SPOT] = {"action": "terminate", "time": "2031-05-01T12:02:00Z"}
    service.paths[REBALANCE] = {"noticeTime": "2031-05-01T11:59:00Z"}
    spot, rebalance = source.ask()
    assert (spot.source, spot.seconds_left) == ("spot", 120.0)
    assert "terminate" in spot.detail
    assert (rebalance.source, rebalance.seconds_left) == ("rebalance", None)
    service.tokens.clear()
    with pytest.raises(OSError, match="401"):
        source.ask()
    assert len(source.ask()) == 2
    service.paths[SPOT] = ["not", "a", "notice"]
    with pytest.raises(ValueError, match="instance-action"):
        source.ask()


def test_a_source_that_answers_nonsense_is_asked_again(metadata):
    """A notice without a time, then a real one: what was heard wrong once may be what matters later."""
    endpoint, service = metadata
    heard = queue.SimpleQueue()
    service.paths[SPOT] = {"action": "terminate"}
    watcher = NoticeWatcher([Ec2Source(endpoint, every_s=0.01)], heard.put)
    try:
        wait_until(lambda: service.seen.count(SPOT) >= 2, "the second time")
        service.paths[SPOT] = {"action": "terminate", "time": "2031-05-01T12:02:00Z"}
        assert heard.get(timeout=60).source == "spot"
    finally:
        watcher.close()


def test_only_ec2_is_asked(tmp_path):
    """Elsewhere that address may be anyone's."""
    vendor = tmp_path / "sys_vendor"
    assert sources_of_this_machine({}, str(vendor)) == []
    vendor.write_text("QEMU\n")
    assert sources_of_this_machine({}, str(vendor)) == []
    vendor.write_text("Amazon EC2\n")
    assert len(sources_of_this_machine({}, str(vendor))) == 1
    assert sources_of_this_machine({"AWS_EC2_METADATA_DISABLED": "true"}, str(vendor)) == []


def test_drains_of_other_nodes_are_not_ours():
    """Ray says when, in milliseconds since 1970; 0 is no time."""
    draining = {"a": int((time.time() + 60) * 1e3), "b": 0, "c": 0}
    a, b = DrainSource(lambda: draining, lambda: ["a", "b"]).ask()
    assert 58 < a.seconds_left <= 60
    assert b.seconds_left is None


# What is saved.


class Clock:
    """The coordinator's; turned by hand, so that nothing here waits for an end that was announced."""

    ahead_s = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cluster(tmp_path, clock):
    made = LocalCluster(str(tmp_path / "run"), clock=clock, interval_steps=10**9, keep_last=100)
    yield made
    made.close()


@pytest.fixture
def training(cluster, tmp_path):
    """Two ranks that train without end, and without a checkpoint."""
    generation = start(cluster, tmp_path)
    assert cluster.committed_steps() == []
    return generation


def start(cluster, folder, **config):
    for path in [*folder.glob("step-*"), *folder.glob("restored-*")]:
        path.unlink()
    generation = cluster.start(jobs.train_noted, {"folder": str(folder), **config}, world_size=2)
    first = cluster.committed_steps()[-1] if cluster.committed_steps() else 0
    wait_until(lambda: len(steps(folder)) == 2 and min(steps(folder)) >= first + 5, "training")
    return generation


def steps(folder):
    return [int(path.read_text()) for path in folder.glob("step-[01]")]


def failures(cluster):
    return cluster.run_store.claim_facts(cluster.run_store.claims()[-1])["failure_rate"]["failures"]


def test_a_spot_notice_saves_at_once_and_again_before_the_end(cluster, training, tmp_path, metadata, clock):
    """From EC2's own service to the store; training goes on, and the loss of the node costs no failure."""
    endpoint, service = metadata
    watcher = NoticeWatcher([Ec2Source(endpoint, every_s=0.05)], cluster.coordinator.hear_notice)
    try:
        end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=10)
        service.paths[SPOT] = {"action": "stop", "time": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
        wait_until(lambda: cluster.committed_steps(), "a checkpoint")
        watcher.close()
        (first,) = cluster.committed_steps()
        wait_until(lambda: min(steps(tmp_path)) > first + 10, "training beyond it")
        assert cluster.committed_steps() == [first], "the second is not due for minutes"
        clock.ahead_s = 650.0
        wait_until(lambda: len(cluster.committed_steps()) == 2, "another checkpoint")
    finally:
        watcher.close()
    second = cluster.committed_steps()[-1]
    wait_until(lambda: min(steps(tmp_path)) > second, "training beyond the last checkpoint")
    training.kill_all()
    start(cluster, tmp_path)
    assert (tmp_path / "restored-0").read_text() == str(second)
    assert failures(cluster) == {"preempted": 1}


def test_a_loss_without_a_notice_is_a_failure(cluster, training, tmp_path):
    """What Ray calls a preemption and came before anything could be saved has cost work."""
    training.kill_all()
    cluster.coordinator.begin_generation(set(cluster.nodes), 2, failure="preempted")
    assert failures(cluster) == {"node": 1}


def test_sigterm_saves_and_ends_the_worker_later(cluster, tmp_path):
    """The handler only passes it on; the process ends when its time is over, or at a second one."""
    generation = start(cluster, tmp_path, sigterm_grace_s=60.0)
    victim = generation.workers[1]
    os.kill(victim.pid, signal.SIGTERM)
    wait_until(lambda: cluster.committed_steps(), "a checkpoint")
    saved = cluster.committed_steps()[0]
    wait_until(lambda: min(steps(tmp_path)) > saved, "training goes on")
    assert victim.is_alive()
    os.kill(victim.pid, signal.SIGTERM)
    victim.join(30)
    assert victim.exitcode == -signal.SIGTERM
    generation.kill_all()
    start(cluster, tmp_path)
    assert failures(cluster) == {"preempted": 1}


@pytest.mark.parametrize("raises", [False, True])
def test_without_a_checkpointer_sigterm_ends_at_once(cluster, tmp_path, raises):
    """Nobody to tell, or an error in telling: nothing to wait for."""
    generation = cluster.start(jobs.sleep_with_sigterm, {"folder": str(tmp_path), "raises": raises})
    wait_until(lambda: (tmp_path / "ready").exists(), "the handler")
    os.kill(generation.workers[0].pid, signal.SIGTERM)
    generation.workers[0].join(30)
    assert generation.workers[0].exitcode == -signal.SIGTERM


def test_ranks_that_are_to_be_stopped_lose_no_step(cluster, training, tmp_path):
    """They stand still at the step that is saved."""
    step = cluster.coordinator.save_and_hold(30.0)
    assert cluster.committed_steps() == [step]
    wait_until(lambda: steps(tmp_path) == [step - 1, step - 1] or steps(tmp_path) == [step, step], "both")
    training.kill_all()
    assert max(steps(tmp_path)) <= step
    start(cluster, tmp_path)
    assert (tmp_path / "restored-0").read_text() == str(step)


def test_ranks_that_are_not_stopped_go_on(cluster, training, tmp_path):
    """No checkpoint in time: the order is taken back."""
    before = max(steps(tmp_path))
    assert cluster.coordinator.save_and_hold(0.01) is None
    wait_until(lambda: min(steps(tmp_path)) > before + 300, "many more steps")


def test_an_order_to_stand_still_that_moves_on_is_followed(cluster, training, tmp_path):
    """Taken back and given for a later step while a rank waits: it may never see that it was taken back."""
    tell = cluster.coordinator._tell_all
    # Above whatever the coordinator has published: pages do not go back to an older plan.
    tell(messages.PublishPlan(Plan(10**6, 1), is_held=True))
    wait_until(lambda: stands_still(tmp_path), "ranks that stand still")
    last = max(steps(tmp_path)) + 50
    tell(messages.PublishPlan(Plan(10**6 + 1, last), is_held=True))
    wait_until(lambda: min(steps(tmp_path)) >= last - 1 and stands_still(tmp_path), "the later step")
    assert max(steps(tmp_path)) <= last
    tell(messages.ReleaseTraining())
    wait_until(lambda: min(steps(tmp_path)) > last, "training that goes on")


def stands_still(folder):
    """Whether no step ends within the time of many."""
    before = steps(folder)
    time.sleep(0.3)  # long for a step, which takes 6 ms; too short a look only looks again
    return steps(folder) == before
