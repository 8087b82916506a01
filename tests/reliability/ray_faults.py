"""SIGKILL of every process of a real Ray Train job, at moments that its store shows.

One head node of our own, one job that trains on with restart after restart,
and the driver submitted anew where it was killed. The judge is that of the
faults without Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from raycheck.store.objects import Store
from tests.reliability.judge import judge
from tests.reliability.ray_job import INTERVAL_STEPS, NUM_RANKS
from tests.reliability.training import Expected
from tests.runtime.harness import wait_until

ROOT = Path(__file__).parents[2]
_DEADLINE_S = 600.0

POINTS = {
    "training": "some time after an acknowledgement",
    "uploading": "a checkpoint's first object is there",
    "committed": "its manifest has just appeared",
    "restoring": "a new worker group has made its claim",
}

KINDS = {
    "SIGKILL of a worker": "worker",
    "SIGKILL of all workers": "workers",
    "SIGKILL of the agent": "AgentActor",
    "SIGKILL of the coordinator": "CoordinatorActor",
    "SIGKILL of the driver": "driver",
    "SIGKILL of Ray Train's controller": "TrainController",
}

_WEIGHTS = {
    "worker": 4,
    "workers": 2,
    "AgentActor": 12,
    "CoordinatorActor": 12,
    "driver": 1,
    "TrainController": 1,
}
_STAYS = ("AgentActor", "CoordinatorActor")
"""Training goes on without these."""


def run(num_faults: int, *, seed: int, end_s: float, write: Callable[[dict[str, object]], None]) -> None:
    """Inflict faults on one job until there are enough, or it is time to stop."""
    rng = random.Random(f"ray {seed} {num_faults}")
    folder = Path(tempfile.mkdtemp(prefix="raycheck-ray-faults-"))
    with head_node(folder / "ray") as head:
        job = Job(head, folder / "job")
        try:
            job.submit()
            job.await_group(after=0)
            for _ in range(num_faults):
                if time.monotonic() > end_s:
                    break
                point, kind = draw(rng)
                began_s = time.monotonic()
                try:
                    facts = job.inflict(point, kind, rng)
                except Exception as error:
                    facts = {"has_fired": True, "is_lost": False, "is_wrong": False}
                    facts["problem"] = f"the job does not go on: {type(error).__name__}: {error}"
                    write({**_named(point, kind), **facts})
                    raise
                write({**_named(point, kind), **facts, "seconds": round(time.monotonic() - began_s, 2)})
        finally:
            job.close()
    shutil.rmtree(folder, ignore_errors=True)


def draw(rng: random.Random) -> tuple[str, str]:
    """Return a point and a kind; those that cost Ray a restart of everything come more rarely."""
    kind = rng.choices(list(KINDS), [_WEIGHTS[each] for each in KINDS.values()])[0]
    # A fault while restoring needs another one before it.
    point = rng.choices(list(POINTS), [5, 5, 5, 1])[0]
    return point, kind


def _named(point: str, kind: str) -> dict[str, object]:
    return {"point": point, "kind": kind, "storage": "local", "is_ray": True}


@dataclasses.dataclass(frozen=True)
class Group:
    """A worker group that trains."""

    generation: int
    restored: int
    digest: str
    pids: tuple[int, ...]


class Job:
    """A job that is submitted again and again; see `tests.reliability.ray_job`."""

    def __init__(self, head: Head, folder: Path) -> None:
        self._head = head
        self._folder = folder
        (folder / "reports").mkdir(parents=True)
        self._root = folder / "run" / "raycheck"
        self._driver: subprocess.Popen[bytes] | None = None
        self._expected = Expected(every=INTERVAL_STEPS)
        self._group: Group | None = None

    def submit(self) -> None:
        """Run the driver, the same command each time."""
        with open(self._folder / "driver.log", "ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "tests.reliability.ray_job", self._head.address, str(self._folder)],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        """Kill the driver; the head node takes the rest along."""
        if self._driver is not None:
            self._driver.kill()
            self._driver.wait()

    def inflict(self, point: str, kind: str, rng: random.Random) -> dict[str, Any]:
        """Kill, and return what came of it."""
        target = KINDS[kind]
        before = self._group
        assert before is not None
        self._await_ack(self._newest_ack())
        self._await_point(point, rng)
        if point == "restoring":
            # The group that was killed to get here, or the one that is on its way.
            before = dataclasses.replace(before, pids=self._starting_pids())
        self._strike(target, before, rng)
        if target in _STAYS and point != "restoring":
            at_kill = self._newest_ack()
            self._await_ack(at_kill, num=2)
        else:
            if target in ("driver", "TrainController"):
                self._await_driver()
                self.submit()
            self.await_group(after=before.generation)
            self._await_ack(self._newest_ack())
        return self._judged(
            has_restored=self._group is not before and self._group.generation > before.generation
        )

    def _await_point(self, point: str, rng: random.Random) -> None:
        if point == "training":
            time.sleep(rng.uniform(0, 0.6))  # a moment by chance, not one to wait for
        elif point == "restoring":
            claims = self._names("generations", r".*\.claim\.json")
            os.kill(self._group.pids[0], signal.SIGKILL)
            self._until(lambda: self._names("generations", r".*\.claim\.json") - claims, "a new claim")
        else:
            pattern = r"manifest\.json" if point == "committed" else r"shard.*"
            known = self._checkpoint_files(pattern)
            self._until(lambda: self._checkpoint_files(pattern) - known, f"the point {point!r}")

    def _strike(self, target: str, group: Group, rng: random.Random) -> None:
        if target == "driver":
            self._driver.kill()
            return
        if target in ("worker", "workers"):
            pids = list(group.pids)
            pids = pids if target == "workers" else [rng.choice(pids)]
        else:
            pids = self._until(lambda: self._head.pids_of(f"ray::{target}"), target)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _starting_pids(self) -> tuple[int, ...]:
        """Return the worker processes of the group that is about to restore."""
        return tuple(self._until(lambda: self._head.pids_of("ray::RayTrainWorker"), "workers"))

    def _await_driver(self) -> None:
        """Wait until the driver has ended, by itself where Ray Train's controller was killed."""
        try:
            self._driver.wait(60)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()

    def await_group(self, *, after: int) -> None:
        """Wait until a group of a later generation trains on all ranks."""
        found = self._until(lambda: self._find_group(after), f"a group after generation {after}")
        self._group = found

    def _find_group(self, after: int) -> Group | None:
        reports: dict[int, list[dict[str, Any]]] = {}
        for path in (self._folder / "reports").iterdir():
            generation, _, rank = path.name.partition("-")
            if not rank.isdigit() or int(generation) <= after:
                continue
            reports.setdefault(int(generation), []).append(json.loads(path.read_text()))
        whole = [number for number, each in reports.items() if len(each) == NUM_RANKS]
        if not whole:
            return None
        first, *others = reports[max(whole)]
        assert all(
            (each["restored"], each["digest"]) == (first["restored"], first["digest"]) for each in others
        )
        pids = tuple(each["pid"] for each in (first, *others))
        if not all(psutil.pid_exists(pid) for pid in pids):
            return None
        return Group(max(whole), first["restored"], first["digest"], pids)

    def _judged(self, *, has_restored: bool) -> dict[str, Any]:
        group = self._group
        acks = self._acks()
        verdict = judge(Store(str(self._root)), self._expected)
        acknowledged = max((step for number, step in acks if number < group.generation), default=0)
        problems = list(verdict.problems)
        is_lost = verdict.newest < max((step for _, step in acks), default=0) and not self._is_moving(
            verdict.newest
        )
        if is_lost:
            problems.append(f"{max(acks)} was acknowledged, step {verdict.newest} is the newest")
        if group.restored < acknowledged:
            is_lost = True
            problems.append(f"restored {group.restored}, acknowledged was {acknowledged}")
        is_wrong = group.digest != self._expected.at(group.restored)
        return {
            "has_fired": True,
            "acknowledged": acknowledged,
            "found": verdict.newest,
            "restored": group.restored,
            "has_restored": has_restored,
            "is_lost": is_lost,
            "is_wrong": is_wrong or bool(verdict.problems),
            "problem": "; ".join(problems),
        }

    def _is_moving(self, newest: int) -> bool:
        """Whether acknowledgements were read after the judge had listed: look once more."""
        acknowledged = max(step for _, step in self._acks())
        return judge(Store(str(self._root)), self._expected).newest >= acknowledged > newest

    def _acks(self) -> list[tuple[int, int]]:
        path = self._folder / "acks"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(number), int(step)) for number, step in map(str.split, lines)]

    def _newest_ack(self) -> tuple[int, int]:
        return max(self._acks(), default=(0, 0))

    def _await_ack(self, after: tuple[int, int], num: int = 1) -> None:
        self._until(
            lambda: len([ack for ack in self._acks() if ack > after]) >= num,
            f"an acknowledgement after {after}",
        )

    def _names(self, folder: str, pattern: str) -> set[str]:
        with contextlib.suppress(FileNotFoundError):
            return {name for name in os.listdir(self._root / folder) if re.fullmatch(pattern, name)}
        return set()

    def _checkpoint_files(self, pattern: str) -> set[str]:
        found = set()
        for name in self._names("checkpoints", r"step-.*"):
            found |= {f"{name}/{file}" for file in self._names(f"checkpoints/{name}", pattern)}
        return found

    def _until(self, condition: Callable[[], Any], what: str) -> Any:
        return wait_until(condition, what, _DEADLINE_S)


@dataclasses.dataclass(frozen=True)
class Head:
    """A head node that we started."""

    address: str
    pid: int

    def pids_of(self, title: str) -> list[int]:
        """Return this node's processes to which Ray has given such a title."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (process.cmdline() or [""])[0].startswith(title):
                    found.append(process.pid)
        return found


def environment() -> dict[str, str]:
    """Return the environment of all that belongs to Ray."""
    return {
        **os.environ,
        # A token left by another Ray on this machine would be asked for.
        "RAY_AUTH_MODE": "disabled",
        # Ray's 15 leaves its workers with next to nothing on a machine that is shared.
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


@contextlib.contextmanager
def head_node(folder: Path) -> Iterator[Head]:
    """Start a head node on the loopback device; end it and its children by their ids."""
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Unix sockets have short names: not below a long folder.
    temporary = tempfile.mkdtemp(prefix="rcray-")
    log = (folder / "head.log").open("wb")
    head = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
            "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4", "--num-gpus=0",
            "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=200000000",
            f"--temp-dir={temporary}",
        ],
        cwd=ROOT, env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: _listens(port) or head.poll() is not None, "Ray's head node", _DEADLINE_S)
        assert head.poll() is None, (folder / "head.log").read_text()
        yield Head(f"127.0.0.1:{port}", head.pid)
    finally:
        family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=20)
        log.close()
        shutil.rmtree(temporary, ignore_errors=True)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
