"""A real run whose processes are killed, and whose store fails, at chosen points of a checkpoint.

Coordinator, agents and workers are those of `tests.runtime.harness`. A
`ChaosCluster` sees every order, delivery and storage call of the coordinator
go by; a fault is an action that runs at one of them, inside the call, so that
it hits the very point and is known to have fired. Faults of the network are
planned there, and hit the next request through `tests.reliability.proxy`.

The judge is `tests.reliability.judge`, which shares no code with the restore.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import resource
import signal
import subprocess
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from raycheck.core import protocol
from raycheck.errors import RaycheckError
from raycheck.runtime import messages
from raycheck.runtime.agent import Limits
from raycheck.runtime.coordinator import Coordinator
from raycheck.store.backend import PartLimits
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.run import RunStore
from raycheck.testing import CutParts, Fault, FaultyConnect, s3_error
from tests.conftest import S3Server, _free_ports
from tests.reliability import proxy as network
from tests.reliability.judge import Verdict, is_record, judge
from tests.reliability.training import NARROW, WIDE, Expected, train
from tests.runtime import harness
from tests.runtime.harness import LocalCluster, processes, wait_until

INTERVAL_STEPS = 6
NUM_RANKS = 2
_MAX_STARTS = 6
_PART_BYTES = 5 << 20

# The fork server imports what its children need once; the first process of all starts it.
processes.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "raycheck.runtime.worker",
        "s3fs",
        "tests.runtime.harness",
        "tests.reliability.chaos",
    ]
)

POINTS = {
    "starting": "a job looks at its store",
    "restoring": "a rank is about to be offered a checkpoint",
    "verified": "a rank has verified its bytes",
    "recording": "the record is about to be written",
    "recorded": "the record is written, and no rank may load yet",
    "before a plan": "the last attempt has been acknowledged",
    "planned": "the plan is about to be sent",
    "staged": "the first rank has its snapshot",
    "uploading": "all ranks have, and none is durable",
    "half uploaded": "the first shard is durable",
    "uploaded": "the manifest is about to be written",
    "written": "the manifest is written and not acknowledged",
    "rotating": "an old manifest is about to be deleted",
}

RESTORE_POINTS = ("restoring", "verified", "recording", "recorded")
SAVE_POINTS = tuple(POINTS)[5:]


class _Hook(Fault):
    """Tells the cluster of the coordinator's storage calls."""

    def __init__(self, cluster: ChaosCluster) -> None:
        super().__init__()
        self.cluster = cluster

    def before(self, operation: str, key: str) -> None:
        is_manifest = key.endswith("/manifest.json")
        if operation == "write" and is_manifest:
            self.cluster.reach("uploaded")
        elif operation == "delete" and is_manifest:
            self.cluster.reach("rotating")
        elif operation == "write" and is_record(key):
            self.cluster.reach("recording")
        self.cluster.obstruct(operation, key)

    def after(self, operation: str, key: str) -> None:
        if operation == "write" and key.endswith("/manifest.json"):
            self.cluster.reach("written")
        elif operation == "write" and is_record(key):
            self.cluster.reach("recorded")


class ChaosCluster(LocalCluster):
    """A run with faults; see the module.

    Args:
        url: The run's store.
        options: Of the store.
        folder: For the trainers' reports.
        retry_s: How long the coordinator tries a storage call again.
        server: What serves the store, if a fault may kill it.
        proxy: What stands before it, if faults of the network may happen; the options lead to it.
        direct_options: Of the store, past the proxy; the judge's.
        width: Of the model.
        step_s: How long a step takes besides its arithmetic.
        environment: Variables of the agents, besides those of the fork server.
        **settings: Of raycheck, besides the usual.
    """

    def __init__(
        self,
        url: str,
        options: Any,
        folder: Path,
        *,
        retry_s: float = 60.0,
        server: RestartableServer | None = None,
        proxy: network.Proxy | None = None,
        direct_options: Any = None,
        width: int = NARROW,
        step_s: float | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.server = server
        self.proxy = proxy
        self.trouble: network.Trouble | None = None
        self.direct_options = direct_options or options
        self.width = width
        self._environment = environment or {}
        self._step_s = step_s or (0.05 if width >= WIDE else 0.01)
        self.acks: list[tuple[int, int]] = []
        self.failures: list[str] = []
        """Why attempts came to nothing."""

        self.fired = threading.Event()
        self.outage: Callable[[str, str], None] | None = None
        self._point: str | None = None
        self._action: Callable[[], None] | None = None
        self._trap = threading.Lock()
        self._retry = RetryPolicy(budget_s=retry_s, first_delay_s=0.02, max_delay_s=0.5)
        self._reports = folder / "reports"
        self._reports.mkdir(parents=True)
        self._stop = folder / "stop"
        self._staged: set[tuple[int, int]] = set()
        self._num_starts = 0
        super().__init__(
            url,
            options,
            num_nodes=NUM_RANKS,
            interval_steps=INTERVAL_STEPS,
            telemetry=False,
            **{"keep_last": 2, "upload_bytes_per_s": 2e7 if width >= WIDE else 4e5, **settings},
        )

    def _make_coordinator(self) -> Coordinator:
        connect = FaultyConnect(_Hook(self))
        store = Store(self.url, self.options, retry=self._retry, connect=connect)
        return Coordinator(run_store=RunStore(store), settings=self.settings, send=self._send)

    def start_agent(self, node: str) -> None:
        """Start a node's agent; on S3 it sends parts of 5 MiB, so that small shards have several."""
        self._pipes.pop(("orders", node), None)
        limits = Limits(bytes_per_s=self.settings.upload_bytes_per_s)
        agent = processes.Process(
            target=_agent_main,
            args=(
                self._environment,
                (node, self.addresses[node], self.url, self.options, self._listener.address, limits),
            ),
            daemon=True,
        )
        agent.start()
        self.agents[node] = agent
        wait_until(lambda: ("orders", node) in self._pipes, f"agent {node}")

    # Points.

    def arm(self, point: str, action: Callable[[], None]) -> None:
        """Have ``action`` run, once, when that point is reached next."""
        self.fired.clear()
        self._point, self._action = point, action

    def reach(self, point: str) -> None:
        with self._trap:
            if point != self._point or self._action is None:
                return
            action, self._action = self._action, None
        try:
            action()
        finally:
            # Not before: whoever waits for it repairs what the action breaks.
            self.fired.set()

    def obstruct(self, operation: str, key: str) -> None:
        if self.outage is not None:
            self.outage(operation, key)

    def _send(self, node: str, order: messages.Order) -> None:
        match order:
            case messages.PublishPlan():
                self.reach("planned")
            case messages.OfferRestore():
                self.reach("restoring")
        if isinstance(order, messages.AttemptEnded) and not order.is_committed:
            self.failures.append(order.detail)
        if isinstance(order, messages.AttemptEnded) and order.is_committed:
            ack = (self.generations[-1].id.number, order.plan.step)
            if ack not in self.acks:
                self.acks.append(ack)
            super()._send(node, order)
            self.reach("before a plan")
            return
        super()._send(node, order)

    def _receive(self, pipe: Any) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                delivery = pipe.recv()
                for message in delivery.messages:
                    self._see(message)
                pipe.send(self.coordinator.receive(delivery))

    def _see(self, message: messages.Message) -> None:
        match message:
            case protocol.Staged():
                self.reach("staged")
                self._staged.add((message.plan_id, message.rank))
                if all((message.plan_id, rank) in self._staged for rank in range(NUM_RANKS)):
                    self.reach("uploading")
            case protocol.Durable():
                self.reach("half uploaded")
            case messages.RestoreReported(error=None):
                self.reach("verified")

    # Life.

    def begin(self) -> None:
        """Start a worker group."""
        self._num_starts += 1
        config = {
            "report": str(self._reports / str(self._num_starts)),
            "stop": str(self._stop),
            "width": self.width,
            "step_s": self._step_s,
        }
        self.start(train, config, world_size=NUM_RANKS)

    def restored(self, deadline_s: float = 120.0) -> tuple[int, str] | None:
        """Wait until all ranks train and return (step, digest), the same on all; None: a worker ended."""
        paths = [self._reports / f"{self._num_starts}-{rank}" for rank in range(NUM_RANKS)]
        workers = self.generations[-1].workers
        wait_until(
            lambda: all(path.exists() for path in paths) or not all(each.is_alive() for each in workers),
            "all ranks to restore",
            deadline_s,
        )
        if not all(path.exists() for path in paths):
            return None
        found = [json.loads(path.read_text()) for path in paths]
        states = [(each["restored"], each["digest"]) for each in found]
        assert states[0] == states[1], f"ranks restored different states: {found}"
        return states[0]

    def describe(self) -> str:
        """Return what a person wants to know when the run does not go on."""
        group = self.generations[-1]
        results = [group.result_path(rank) for rank in range(NUM_RANKS)]
        facts: dict[str, Any] = {
            "status": self.status(),
            "workers": [(worker.pid, worker.exitcode) for worker in group.workers],
            "results": [path.read_text() if path.exists() else None for path in results],
            "agents": {node: (agent.pid, agent.exitcode) for node, agent in self.agents.items()},
            "failures": self.failures[-3:],
            "orders": [str(order) for order in self.orders[-6:]],
        }
        generation = self.coordinator._generation
        if generation is not None:
            vote = generation.vote
            facts["vote"] = [sorted(vote._asked), sorted(vote._well), vote._current, vote._end]
            facts["joined"] = sorted(generation.commits._joined) if generation.commits else None
        return json.dumps(facts, default=str)

    def judge(self, expected: Expected) -> Verdict:
        """Return what is to be said of the store as it is now."""
        return judge(Store(self.url, self.direct_options), expected)

    def end_group(self) -> None:
        self.generations[-1].kill_all()

    def checkpoint_folders(self, step: int | None) -> list[Path]:
        """Return the folders, in a local store, of a step, or of all with a manifest."""
        name = "step-*" if step is None else f"step-{step:010d}-*"
        return [path.parent for path in sorted(Path(self.url).glob(f"checkpoints/{name}/manifest.json"))]

    def newest_ack(self) -> int:
        return max((step for _, step in self.acks), default=0)

    def wait_for_ack(self, num: int = 1) -> None:
        """Wait for so many acknowledgements from now on."""
        before = len(self.acks)
        wait_until(lambda: len(self.acks) >= before + num, "an acknowledged checkpoint")


def make_identity(name: str, actions: list[str]) -> dict[str, Any]:
    """Return an identity with fresh credentials, as SeaweedFS wants it in its configuration."""
    credentials = [{"accessKey": uuid.uuid4().hex, "secretKey": uuid.uuid4().hex}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _agent_main(environment: dict[str, str], arguments: tuple[Any, ...]) -> None:
    """Run the harness's agent in a process of its own; on S3 with parts of 5 MiB."""
    os.environ.update(environment)
    _, _, url, *_ = arguments
    if url.startswith("s3://"):
        parts = FaultyConnect(CutParts(PartLimits(default_part_bytes=_PART_BYTES)))
        harness.Store = functools.partial(Store, connect=parts)  # type: ignore[misc,assignment]
    harness._agent_main(*arguments)


class RestartableServer:
    """An S3 server (SeaweedFS) on ports and data of its own, which come back when it does.

    It knows three identities: ``options`` are those of one that may do all,
    ``other_options`` of another, ``reader_options`` of one that may only read.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        s3, master, volume, filer, admin = _free_ports(5)
        config = folder / "identities.json"
        every = ["Admin", "Read", "Write", "List", "Tagging"]
        identities = [
            make_identity(*each) for each in (("one", every), ("two", every), ("reader", ["Read", "List"]))
        ]
        config.write_text(json.dumps({"identities": identities}))
        self._key, self._secret = identities[0]["credentials"][0].values()
        flags = {
            "dir": folder,
            "s3.config": config,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": s3,
            "master.port": master,
            "volume.port": volume,
            "filer.port": filer,
            "admin.port": admin,
            "admin.ui": "false",
            "webdav": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.telemetry": "false",
        }
        binary = Path(sysconfig.get_path("scripts")) / "weed"
        self._command = [str(binary), "-logtostderr=true", "mini", *(f"-{k}={v}" for k, v in flags.items())]
        self.endpoint = f"http://127.0.0.1:{s3}"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = "s3://raycheck-tests/run"
        self.options, self.other_options, self.reader_options = (
            {"key": key, "secret": secret, "endpoint_url": self.endpoint}
            for key, secret in (each["credentials"][0].values() for each in identities)
        )
        self._has_bucket = False
        self.start()

    def start(self) -> None:
        """Start the server, or start it again; return when it answers."""
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        server = S3Server(self.endpoint, self._key, self._secret, "raycheck-tests", self._process.pid)
        wait_until(lambda: self._answers(server), "the S3 server to take objects")

    def _answers(self, server: S3Server) -> bool:
        try:
            # Made once: after a kill it is there, and asking for it again is an error.
            if not self._has_bucket:
                server.client.create_bucket(Bucket=server.bucket)
                self._has_bucket = True
            server.client.put_object(Bucket=server.bucket, Key="ready", Body=b"yes")
        except (BotoCoreError, ClientError):
            return False
        return True

    def kill(self) -> None:
        """SIGKILL."""
        process = self._process
        assert process is not None
        process.kill()
        process.wait()


# Faults.


def kill_worker(cluster: ChaosCluster) -> None:
    os.kill(cluster.generations[-1].workers[1].pid, signal.SIGKILL)


def kill_agent(cluster: ChaosCluster) -> None:
    os.kill(cluster.agents["node1"].pid, signal.SIGKILL)


def lose_coordinator(cluster: ChaosCluster) -> None:
    cluster.coordinator._inbox.put(None)


def kill_all(cluster: ChaosCluster) -> None:
    for worker in cluster.generations[-1].workers:
        os.kill(worker.pid, signal.SIGKILL)
    for agent in cluster.agents.values():
        os.kill(agent.pid, signal.SIGKILL)
    lose_coordinator(cluster)


def lose_reply(cluster: ChaosCluster) -> None:
    raise ConnectionResetError("reply lost (test)")


def kill_server(cluster: ChaosCluster) -> None:
    assert cluster.server is not None
    cluster.server.kill()


def refuse(cluster: ChaosCluster) -> None:
    """All of the coordinator's calls get 503 SlowDown for half a second."""
    end_s = time.monotonic() + 0.5

    def outage(operation: str, key: str) -> None:
        if time.monotonic() < end_s:
            raise s3_error("SlowDown", 503)
        cluster.outage = None

    cluster.outage = outage


def fill_disk(cluster: ChaosCluster) -> None:
    """No agent can write a file of more than 4 kB any more, as with a quota."""
    for agent in cluster.agents.values():
        limit_file_size(agent.pid, 4096)


def limit_file_size(pid: int, num_bytes: int) -> None:
    """Have writes of a process fail beyond so many bytes of a file (EFBIG); -1: no limit."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, -1))


def meet(make: Callable[[], network.Trouble]) -> Callable[[ChaosCluster], None]:
    """Return an action that plans a fault for the next requests."""

    def strike(cluster: ChaosCluster) -> None:
        assert cluster.proxy is not None
        cluster.trouble = cluster.proxy.plan(make())

    return strike


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a fault does, and where it makes sense."""

    strike: Callable[[ChaosCluster], None]
    needs: str = ""
    """"local", "server" or "proxy"; "": any storage."""

    points: tuple[str, ...] = ()
    """Only there; empty: everywhere but at "starting"."""

    ends_group: bool = False
    """A new worker group is started by whoever watches, as Ray does."""


_WRITES = ("put", "begin", "part", "complete")

KINDS: dict[str, Kind] = {
    "SIGKILL of a worker": Kind(kill_worker, ends_group=True),
    "SIGKILL of an agent": Kind(kill_agent),
    "loss of the coordinator": Kind(lose_coordinator),
    "SIGKILL of everything": Kind(kill_all, ends_group=True),
    "lost reply": Kind(lose_reply, points=("written", "recorded", "rotating")),
    "503 for a while": Kind(refuse),
    "disk full": Kind(fill_disk, needs="local", points=SAVE_POINTS),
    "SIGKILL of the S3 server": Kind(kill_server, needs="server"),
    "slow replies": Kind(meet(lambda: network.Delay(0.4, times=4)), needs="proxy", points=tuple(POINTS)),
    "cut within a request": Kind(
        meet(lambda: network.CutRequest("put", "part", times=2)), needs="proxy", points=tuple(POINTS)
    ),
    "cut within a reply": Kind(
        meet(lambda: network.CutReply("get", "list", "begin", "complete", times=2)),
        needs="proxy",
        points=tuple(POINTS),
    ),
    "503 SlowDown": Kind(
        meet(lambda: network.Refuse(503, "SlowDown", times=5)), needs="proxy", points=tuple(POINTS)
    ),
    "PUT done, reply lost": Kind(
        meet(lambda: network.LoseReply("put", "part", "complete")), needs="proxy", points=tuple(POINTS)
    ),
    "ExpiredToken": Kind(
        meet(lambda: network.Refuse(403, "ExpiredToken", times=3)), needs="proxy", points=tuple(POINTS)
    ),
    "AccessDenied on writes": Kind(
        meet(lambda: network.Refuse(403, "AccessDenied", *_WRITES, times=2)),
        needs="proxy",
        points=tuple(POINTS),
    ),
    "stale listings": Kind(meet(network.StaleListing), needs="proxy", points=("starting",)),
}


def applies(point: str, kind: str, *, has: tuple[str, ...] = ("local",)) -> bool:
    """Whether a fault of this kind can be at this point, where there is a "local" store, "server" or "proxy"."""
    each = KINDS[kind]
    if each.needs and each.needs not in has:
        return False
    return point in each.points if each.points else point != "starting"


@dataclasses.dataclass
class Outcome:
    """What a fault did."""

    point: str
    kind: str
    has_fired: bool
    acknowledged: int
    """The newest step acknowledged before the group that restored was started."""

    found: int
    """The newest step that restores, as the judge sees the store."""

    restored: int
    """The step that a worker group restored after it."""

    is_lost: bool
    is_wrong: bool
    has_restored: bool = False
    """Whether a worker group was started after it."""

    num_refused: int = 0
    """Starts that ended with an error before one succeeded."""

    problem: str = ""
    """What is wrong, in words."""

    @property
    def is_well(self) -> bool:
        return self.has_fired and not self.is_lost and not self.is_wrong and not self.problem


class Campaign:
    """One run that goes on through one fault after the other."""

    def __init__(self, cluster: ChaosCluster, expected: Expected | None = None) -> None:
        self.cluster = cluster
        self.expected = expected or Expected(cluster.width, INTERVAL_STEPS)
        self._acknowledged = 0
        self._num_refused = 0
        self._problems: list[str] = []
        self._start()
        cluster.wait_for_ack()

    def inflict(self, point: str, kind: str, *, restarts: bool = True) -> Outcome:
        """Cause one fault, repair what it broke, and judge.

        Args:
            point: One of `POINTS`.
            kind: One of `KINDS`.
            restarts: Have a worker group restore afterwards, also where the
                fault did not end the one before. Without, the judge alone reads
                what is stored.
        """
        cluster = self.cluster
        self._num_refused, self._problems, self._has_restored = 0, [], False
        strike = functools.partial(KINDS[kind].strike, cluster)
        if point == "starting":
            has_fired = self._strike_a_start(kind, strike)
        elif point in RESTORE_POINTS:
            has_fired = self._strike_a_restore(point, kind, strike)
        else:
            cluster.arm(point, strike)
            has_fired = cluster.fired.wait(90) and self._await_trouble()
            if kind == "disk full":
                has_fired &= self._await_full_disk()
            self._repair(kind)
        # Before anything new can hide a loss, and again when the run is well, as it must be.
        first = self._judge()
        cluster.wait_for_ack()
        second = self._judge()
        if restarts and not self._has_restored:
            self._restart()
        step, state = self._restored
        if self._has_restored and step < self._acknowledged:
            self._problems.append(f"restored {step}, acknowledged was {self._acknowledged}")
        is_wrong = state != self.expected.at(step)
        return Outcome(
            point,
            kind,
            has_fired,
            self._acknowledged,
            second.newest,
            step,
            is_lost=bool(self._problems),
            is_wrong=is_wrong or bool(first.problems or second.problems),
            has_restored=self._has_restored,
            num_refused=self._num_refused,
            problem="; ".join([*self._problems, *first.problems, *second.problems]),
        )

    def _strike_a_start(self, kind: str, strike: Callable[[], None]) -> bool:
        """Have a job look at the store as it does at its start, then start a group."""
        cluster = self.cluster
        self._end_group()
        strike()
        for _ in range(_MAX_STARTS):
            try:
                cluster.coordinator.check()
            except RaycheckError as error:
                self._num_refused += 1
                if kind == "stale listings" and "consistent" not in str(error):
                    self._problems.append(f"refused for another reason: {error}")
            if cluster.trouble.num_fired or kind != "stale listings":
                break
        if kind == "stale listings" and not self._num_refused:
            self._problems.append("a store with stale listings was not refused")
        if kind == "stale listings":
            self._lift()
        has_fired = self._await_trouble() if cluster.trouble else True
        self._start()
        self._lift()
        return has_fired

    def _strike_a_restore(self, point: str, kind: str, strike: Callable[[], None]) -> bool:
        cluster = self.cluster
        self._end_group()
        cluster.arm(point, strike)
        self._begin()
        has_fired = cluster.fired.wait(90) and self._await_trouble()
        self._repair(kind)
        if not KINDS[kind].ends_group:
            self._look()
        return has_fired

    def _await_trouble(self) -> bool:
        trouble = self.cluster.trouble
        return trouble is None or network.wait_for_firing(trouble)

    def _lift(self) -> None:
        cluster = self.cluster
        if cluster.trouble is not None:
            assert cluster.proxy is not None
            cluster.proxy.lift(cluster.trouble)
            cluster.trouble = None

    def _repair(self, kind: str) -> None:
        cluster = self.cluster
        if cluster.trouble is not None and cluster.trouble.num_fired:
            # What is left of it may happen as well; no fault is without end.
            end_s = time.monotonic() + 2
            while not cluster.trouble.is_spent and time.monotonic() < end_s:
                time.sleep(0.01)
        self._lift()
        if kind == "disk full":
            for agent in cluster.agents.values():
                limit_file_size(agent.pid, -1)
        elif kind == "SIGKILL of the S3 server":
            assert cluster.server is not None
            cluster.server.start()
        elif kind == "SIGKILL of an agent":
            cluster.agents["node1"].join(30)
            cluster.start_agent("node1")
        elif kind == "loss of the coordinator":
            cluster.coordinator._thread.join(30)
            cluster.replace_coordinator()
        elif kind == "SIGKILL of everything":
            for agent in cluster.agents.values():
                agent.join(30)
            cluster.coordinator._thread.join(30)
            for node in cluster.nodes:
                cluster.start_agent(node)
            cluster.replace_coordinator()
        if KINDS[kind].ends_group:
            self._restart()

    def _await_full_disk(self) -> bool:
        """Wait until an attempt has failed for it; return whether one has."""
        end_s = time.monotonic() + 30
        while not any("cannot write" in detail for detail in self.cluster.failures):
            if time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        self.cluster.failures.clear()
        return True

    def _restart(self) -> None:
        self._end_group()
        self._start()

    def _end_group(self) -> None:
        self.cluster.end_group()
        # What is acknowledged from here on comes from the new group alone.
        wait_until(lambda: not self.cluster.generations[-1].workers[0].is_alive(), "the end of the group")
        self._acknowledged = self.cluster.newest_ack()

    def _start(self) -> None:
        self._begin()
        self._look()

    def _begin(self) -> None:
        """Start a group; if the store refuses that, again, as a user would."""
        for _ in range(_MAX_STARTS):
            try:
                self.cluster.begin()
            except RaycheckError:
                self._num_refused += 1
            else:
                return
        self.cluster.begin()

    def _look(self) -> None:
        """Wait until the group trains; if it ends before, start another, as Ray does."""
        for _ in range(_MAX_STARTS):
            found = self.cluster.restored()
            if found is not None:
                self._restored, self._has_restored = found, True
                return
            self._num_refused += 1
            self._end_group()
            self._begin()
        raise AssertionError(f"no worker group restores: {self.cluster.generations[-1].id}")

    def _judge(self) -> Verdict:
        acknowledged = self.cluster.newest_ack()
        verdict = self.cluster.judge(self.expected)
        if verdict.newest < acknowledged:
            self._problems.append(f"step {acknowledged} was acknowledged, {verdict.newest} is the newest")
        return verdict
