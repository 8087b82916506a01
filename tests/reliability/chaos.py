"""A real run whose processes are killed, and whose store fails, at chosen points of a checkpoint.

Coordinator, agents and workers are those of `tests.runtime.harness`. A
`ChaosCluster` sees every order, delivery and storage call of the coordinator
go by; a fault is an action that runs at one of them, inside the call, so that
it hits the very point and is known to have fired.

The judge shares no code with the restore: it follows the parents in the
records itself, reads the shards with `safetensors`, and compares parameters
with those that the same training has at that step without any checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from botocore.exceptions import BotoCoreError, ClientError

import raycheck
from raycheck.core import protocol
from raycheck.errors import StorageError
from raycheck.runtime import messages
from raycheck.runtime.coordinator import Coordinator
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.run import RunStore
from raycheck.testing import Fault, FaultyConnect, s3_error
from tests.conftest import S3Server, _free_ports
from tests.runtime.harness import LocalCluster, wait_until

WIDTH = 64
INTERVAL_STEPS = 6
NUM_RANKS = 2

POINTS = {
    "before a plan": "the last attempt has been acknowledged",
    "planned": "the plan is about to be sent",
    "staged": "the first rank has its snapshot",
    "uploading": "all ranks have, and none is durable",
    "half uploaded": "the first shard is durable",
    "uploaded": "the manifest is about to be written",
    "written": "the manifest is written and not acknowledged",
    "rotating": "an old manifest is about to be deleted",
    "restoring": "a rank is about to be offered a checkpoint",
    "verified": "a rank has verified its bytes",
    "recording": "the record is about to be written",
    "recorded": "the record is written, and no rank may load yet",
}

RESTORE_POINTS = ("restoring", "verified", "recording", "recorded")


class _Trainer:
    """A small training whose every step is a function of the step before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, step: int) -> None:
        features = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.model(features).square().mean().backward()
        self.optimizer.step()


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].detach().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def train(config: dict[str, Any]) -> None:
    """Train until killed or told to stop; say in a file what was restored."""
    trainer = _Trainer()
    ckpt = raycheck.attach(model=trainer.model, optimizer=trainer.optimizer)
    report = {"restored": ckpt.current_step, "digest": _digest(trainer.model.state_dict())}
    path = Path(config["reports"]) / f"{config['start']}-{config['rank']}"
    path.with_suffix(".tmp").write_text(json.dumps(report))
    path.with_suffix(".tmp").rename(path)
    while not os.path.exists(config["stop"]):
        trainer.step(ckpt.current_step)
        time.sleep(config.get("step_s", 0.01))  # what else a step would do
        ckpt.step()


class Expected:
    """What the parameters are after each step, without raycheck."""

    def __init__(self) -> None:
        self._trainer = _Trainer()
        self._digests = [_digest(self._trainer.model.state_dict())]

    def at(self, step: int) -> str:
        if len(self._digests) <= step:
            # The default generator is part of the training: kept apart from all else here.
            with torch.random.fork_rng():
                if len(self._digests) > 1:
                    torch.set_rng_state(self._rng)
                else:
                    self._trainer = _Trainer()
                while len(self._digests) <= step:
                    self._trainer.step(len(self._digests) - 1)
                    self._digests.append(_digest(self._trainer.model.state_dict()))
                self._rng = torch.get_rng_state()
        return self._digests[step]


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
        elif operation == "write" and _is_record(key):
            self.cluster.reach("recording")
        self.cluster.obstruct(operation, key)

    def after(self, operation: str, key: str) -> None:
        if operation == "write" and key.endswith("/manifest.json"):
            self.cluster.reach("written")
        elif operation == "write" and _is_record(key):
            self.cluster.reach("recorded")


def _is_record(key: str) -> bool:
    return key.startswith("generations/") and key.count(".") == 1


class ChaosCluster(LocalCluster):
    """A run with faults; see the module.

    Args:
        url: The run's store.
        options: Of the store.
        folder: For the trainers' reports.
        retry_s: How long the coordinator tries a storage call again.
        server: What serves the store, if a fault may kill it.
    """

    def __init__(
        self,
        url: str,
        options: Any,
        folder: Path,
        *,
        retry_s: float = 60.0,
        server: RestartableServer | None = None,
    ) -> None:
        self.server = server
        self.acks: list[tuple[int, int]] = []
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
            keep_last=2,
            upload_bytes_per_s=400_000,
            telemetry=False,
        )

    def _make_coordinator(self) -> Coordinator:
        connect = FaultyConnect(_Hook(self))
        store = Store(self.url, self.options, retry=self._retry, connect=connect)
        return Coordinator(run_store=RunStore(store), settings=self.settings, send=self._send)

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
        self.fired.set()
        action()

    def obstruct(self, operation: str, key: str) -> None:
        if self.outage is not None:
            self.outage(operation, key)

    def _send(self, node: str, order: messages.Order) -> None:
        match order:
            case messages.PublishPlan():
                self.reach("planned")
            case messages.OfferRestore():
                self.reach("restoring")
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
        config = {"reports": str(self._reports), "start": self._num_starts, "stop": str(self._stop)}
        self.start(train, config, world_size=NUM_RANKS)

    def restored(self, deadline_s: float = 60.0) -> tuple[int, str]:
        """Wait until all ranks train and return (step, digest), which must be the same on all."""
        paths = [self._reports / f"{self._num_starts}-{rank}" for rank in range(NUM_RANKS)]
        wait_until(lambda: all(path.exists() for path in paths), "all ranks to restore", deadline_s)
        found = [json.loads(path.read_text()) for path in paths]
        assert found[0] == found[1], f"ranks restored different states: {found}"
        return found[0]["restored"], found[0]["digest"]

    def end_group(self) -> None:
        self.generations[-1].kill_all()

    def newest_ack(self) -> int:
        return max((step for _, step in self.acks), default=0)

    def wait_for_ack(self, num: int = 1) -> None:
        """Wait for so many acknowledgements from now on."""
        before = len(self.acks)
        wait_until(lambda: len(self.acks) >= before + num, "an acknowledged checkpoint")


class RestartableServer:
    """An S3 server (SeaweedFS) on ports and data of its own, which come back when it does."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        s3, master, volume, filer, admin = _free_ports(5)
        self._key, self._secret = uuid.uuid4().hex, uuid.uuid4().hex
        flags = {
            "dir": folder,
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
        self._endpoint = f"http://127.0.0.1:{s3}"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = "s3://raycheck-tests/run"
        self.options = {"key": self._key, "secret": self._secret, "endpoint_url": self._endpoint}
        self._has_bucket = False
        self.start()

    def start(self) -> None:
        """Start the server, or start it again; return when it answers."""
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "AWS_ACCESS_KEY_ID": self._key, "AWS_SECRET_ACCESS_KEY": self._secret},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        server = S3Server(self._endpoint, self._key, self._secret, "raycheck-tests", self._process.pid)
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
        assert self._process is not None
        self._process.kill()
        self._process.wait()


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


KINDS: dict[str, Callable[[ChaosCluster], None]] = {
    "SIGKILL of a worker": kill_worker,
    "SIGKILL of an agent": kill_agent,
    "loss of the coordinator": lose_coordinator,
    "SIGKILL of everything": kill_all,
    "lost reply": lose_reply,
    "503 for a while": refuse,
    "SIGKILL of the S3 server": kill_server,
}


ENDS_GROUP = ("SIGKILL of a worker", "SIGKILL of everything")
"""After these a new worker group is started by whoever watches, as Ray does."""


def applies(point: str, kind: str, *, has_server: bool = False) -> bool:
    """Whether a fault of this kind can be at this point."""
    if kind == "SIGKILL of the S3 server":
        return has_server
    return kind != "lost reply" or point in ("written", "recorded", "rotating")


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

    @property
    def is_well(self) -> bool:
        return self.has_fired and not self.is_lost and not self.is_wrong


class Campaign:
    """One run that goes on through one fault after the other."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self.cluster = cluster
        self.expected = Expected()
        self._acknowledged_at_restart = 0
        cluster.begin()
        self._last_restore = self._look()
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
        action = KINDS[kind]
        if point in RESTORE_POINTS:
            cluster.end_group()
            self._acknowledged_at_restart = cluster.newest_ack()
            cluster.arm(point, lambda: action(cluster))
            cluster.begin()
        else:
            cluster.arm(point, lambda: action(cluster))
        has_fired = cluster.fired.wait(90)
        self._repair(kind)
        if point in RESTORE_POINTS and kind not in ENDS_GROUP:
            self._last_restore = self._look()
            restarts = False
        # Before anything new can hide a loss, and again when the run is well, as it must be.
        found, is_found_wrong = self.judge_store()
        is_lost = found < self._acknowledged_at_judgement
        cluster.wait_for_ack()
        found, is_wrong_later = self.judge_store()
        is_lost |= found < self._acknowledged_at_judgement
        if kind not in ENDS_GROUP and restarts:
            self._last_restore = self._restart()
        restored, is_wrong = self._last_restore
        return Outcome(
            point,
            kind,
            has_fired,
            self._acknowledged_at_restart,
            found,
            restored,
            is_lost or restored < self._acknowledged_at_restart,
            is_wrong or is_found_wrong or is_wrong_later,
        )

    def _repair(self, kind: str) -> None:
        cluster = self.cluster
        if kind == "SIGKILL of the S3 server":
            assert cluster.server is not None
            cluster.server.start()
        if kind == "SIGKILL of an agent":
            cluster.agents["node1"].join(30)
            cluster.start_agent("node1")
        elif kind == "loss of the coordinator":
            cluster.coordinator._thread.join(30)
            cluster.replace_coordinator()
        elif kind == "SIGKILL of everything":
            for agent in cluster.agents.values():
                agent.join(30)
            cluster.coordinator._thread.join(30)
            cluster.end_group()
            for node in cluster.nodes:
                cluster.start_agent(node)
            cluster.replace_coordinator()
        if kind in ENDS_GROUP:
            self._last_restore = self._restart()

    def _restart(self) -> tuple[int, bool]:
        self.cluster.end_group()
        # What is acknowledged from here on comes from the new group alone.
        wait_until(lambda: not self.cluster.generations[-1].workers[0].is_alive(), "the end of the group")
        self._acknowledged_at_restart = self.cluster.newest_ack()
        self.cluster.begin()
        return self._look()

    def _look(self) -> tuple[int, bool]:
        step, digest = self.cluster.restored(120)
        return step, digest != self.expected.at(step)

    def judge_store(self) -> tuple[int, bool]:
        """Return the newest step that counts and is whole, and whether any that counts is wrong."""
        self._acknowledged_at_judgement = self.cluster.newest_ack()
        run = RunStore(Store(self.cluster.url, self.cluster.options))
        for _ in range(5):
            try:
                return self._judge(run.store)
            except (FileNotFoundError, StorageError):
                # Rotation deleted one between our listing and our reading.
                continue
        return self._judge(run.store)

    def _judge(self, store: Store) -> tuple[int, bool]:
        objects = {info.key for info in store.list_keys()}
        records = {}
        for key in objects:
            if _is_record(key):
                record = json.loads(store.get(key))
                records[tuple(record["generation"])] = record
        limits: dict[tuple[int, str], float] = {}
        at, limit = max(records), float("inf")
        while True:
            limits[at] = limit
            parent = records[at]["parent"]
            if parent is None:
                break
            limit = min(limit, parent[0])
            at = (parent[1], parent[2])
        newest, is_wrong = 0, False
        for key in sorted(objects):
            if not key.endswith("/manifest.json"):
                continue
            manifest = json.loads(store.get(key))
            if manifest["step"] > limits.get(tuple(manifest["generation"]), -1):
                continue
            folder = key.rpartition("/")[0]
            tensors: dict[str, torch.Tensor] = {}
            for _, name, num_bytes, _ in manifest["shards"]:
                data = store.get(f"{folder}/{name}")
                assert len(data) == num_bytes
                tensors.update(safetensors.torch.load(data))
            model = {
                name.removeprefix("model."): tensor
                for name, tensor in tensors.items()
                if name.startswith("model.") and "@" not in name
            }
            is_wrong |= _digest(model) != self.expected.at(manifest["step"])
            newest = max(newest, manifest["step"])
        return newest, is_wrong
