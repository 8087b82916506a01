"""What becomes of a Ray Train job when something of it dies: steps lost, seconds, and where it goes on from.

    python benchmarks/recovery.py --document docs/recovery.md
    python benchmarks/recovery.py --row "SIGKILL of a worker" --outage-s 20

A local cluster of a head node and two nodes with one worker each, an S3 server
(SeaweedFS), and a job that takes one or two workers. Each row begins with a
job that trains and has committed, strikes in the middle between two
checkpoints, and ends when training goes on. Steps lost are those that were
taken and are not in the checkpoint that is restored.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import ray

from raycheck.store.objects import Store
from raycheck.store.run import RunStore
from tests.ray_jobs.nodes import Node, alive, drain
from tests.reliability.chaos import RestartableServer
from tests.reliability.ray_faults import Head, environment, head_node
from tests.runtime.harness import wait_until

ROOT = Path(__file__).parent.parent
WAIT_S = 600.0
INTERVAL_STEPS = 60
STEP_S = 0.05
NOTICE_S = 30
MARGIN_STEPS = 15
"""So many steps after a checkpoint, and before the next, comes the strike."""


@dataclasses.dataclass
class Start:
    """What rank 0 of one worker group has written."""

    facts: dict[str, Any]
    steps: list[tuple[int, float]]
    """Number and the time of its end, in the order in which they were taken."""


@dataclasses.dataclass
class Result:
    """One row."""

    name: str
    lost_steps: int
    first_step_s: float
    """From the strike to the end of the first step after it that had not been under way."""

    is_restart: bool
    restored: int | None
    source: str
    restore_s: float | None
    note: str = ""


class Scene:
    """One job on the cluster."""

    def __init__(self, cluster: Cluster, folder: Path, options: argparse.Namespace) -> None:
        self.cluster, self.folder, self.options = cluster, folder, options
        (folder / "starts").mkdir(parents=True)
        self.storage = f"s3://raycheck-tests/{folder.name}"
        self.config = {
            "num_mb": options.mb,
            "step_s": STEP_S,
            "interval_steps": INTERVAL_STEPS,
            "storage": self.storage,
            "storage_options": cluster.server.options,
        }
        self.driver: subprocess.Popen[bytes] | None = None
        self.submit()

    def submit(self) -> None:
        """Run the driver: the same command each time."""
        with open(self.folder / "driver.log", "ab") as log:
            self.driver = subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.recovery_job"),
                    *(self.cluster.head.address, str(self.folder), json.dumps(self.config)),
                ],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Also where this command runs in the background of a shell, which ignores it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def starts(self) -> list[Start]:
        """Return what each group has written, in order."""
        found = []
        for path in sorted((self.folder / "starts").glob("*-0")):
            first, _, rest = path.read_text().partition("\n")
            if rest:
                lines = (line.split() for line in rest.splitlines())
                steps = [(int(line[0]), float(line[1])) for line in lines if len(line) == 2]
                found.append(Start(json.loads(first), steps))
        return [start for start in found if start.steps]

    def committed(self) -> list[int]:
        """Return the committed steps that are in the store."""
        run = RunStore(Store(f"{self.storage}/run/raycheck", self.cluster.server.options))
        return sorted(ref.step for ref in run.attempts() if run.is_committed(ref))

    def await_middle(self, world_size: int = 2) -> None:
        """Wait until a group of this size is in the middle between two checkpoints, the first of them committed."""

        def is_there() -> bool:
            starts = self.starts()
            if not starts or starts[-1].facts["world_size"] != world_size or len(starts[-1].steps) < 10:
                return False
            step = starts[-1].steps[-1][0]
            begun, since = divmod(step, INTERVAL_STEPS)
            if not MARGIN_STEPS <= since <= INTERVAL_STEPS - MARGIN_STEPS or begun == 0:
                return False
            return begun * INTERVAL_STEPS in self.committed()

        wait_until(is_there, f"{world_size} workers in the middle between two checkpoints", WAIT_S)

    def pids(self) -> list[int]:
        """Return the processes of the present group, by rank."""
        begun = []
        for path in (self.folder / "starts").glob("*"):
            at, _, rank = path.name.partition("-")
            begun.append((int(at), int(rank), json.loads(path.read_text().partition("\n")[0])))
        newest = max(at for at, rank, _ in begun if rank == 0)
        group = {rank: facts["pid"] for at, rank, facts in sorted(begun, key=lambda one: one[0])}
        assert any(at == newest for at, _, _ in begun)
        return [group[rank] for rank in sorted(group)]

    def close(self) -> None:
        """End the job."""
        (self.folder / "stop").touch()
        try:
            self.driver.wait(60)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            self.driver.wait()


class Cluster:
    """Head node, further nodes, S3 server."""

    def __init__(self, head: Head, server: RestartableServer, folder: Path) -> None:
        self.head, self.server, self.folder = head, server, folder
        self.nodes: list[Node] = []

    def have_nodes(self, number: int) -> list[Node]:
        """Start nodes until there are so many that run and that Ray does not drain; end those beyond."""
        running = []
        for node in self.nodes:
            if node.is_running and node.id in alive() and not getattr(node, "is_drained", False):
                running.append(node)
            else:
                node.kill()
        for node in running[number:]:
            node.kill()
        self.nodes = running[:number]
        while len(self.nodes) < number:
            self.nodes.append(Node(self.head.address, self.folder, environment()))
        return self.nodes

    def pids_of(self, title: str) -> list[int]:
        """Return all processes on this machine's nodes to which Ray has given such a title."""
        found = self.head.pids_of(title)
        for node in self.nodes:
            if node.is_running:
                found += Head("", node.process.pid).pids_of(title)
        return found


def kill(*pids: int) -> float:
    """SIGKILL; return when."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return time.time()


# Strikes: each returns when it struck.


def kill_worker(scene: Scene) -> float:
    return kill(scene.pids()[1])


def kill_workers(scene: Scene) -> float:
    return kill(*scene.pids())


def kill_worker_and_agents(scene: Scene) -> float:
    return kill(*scene.cluster.pids_of("ray::AgentActor"), *scene.pids())


def kill_agents(scene: Scene) -> float:
    return kill(*scene.cluster.pids_of("ray::AgentActor"))


def kill_coordinator(scene: Scene) -> float:
    return kill(*scene.cluster.pids_of("ray::CoordinatorActor"))


def kill_controller(scene: Scene) -> float:
    struck_s = kill(*scene.cluster.pids_of("ray::TrainController"))
    wait_until(lambda: scene.driver.poll() is not None, "the driver's end", WAIT_S)
    scene.submit()
    return struck_s


def kill_driver(scene: Scene) -> float:
    scene.driver.kill()
    struck_s = time.time()
    scene.driver.wait()
    scene.submit()
    return struck_s


def interrupt_driver(scene: Scene) -> float:
    scene.driver.send_signal(signal.SIGINT)
    struck_s = time.time()
    scene.driver.wait(WAIT_S)
    scene.submit()
    return struck_s


def kill_node(scene: Scene) -> float:
    node = scene.cluster.nodes[1]
    struck_s = time.time()
    node.kill()
    return struck_s


def drain_and_kill_node(scene: Scene) -> float:
    node = scene.cluster.nodes[1]
    told_s = time.time()
    drain(scene.cluster.head.address, node, deadline_s=NOTICE_S)
    node.is_drained = True  # type: ignore[attr-defined]
    # It is taken away when it was said to be.
    wait_until(lambda: time.time() >= told_s + NOTICE_S, "the deadline", WAIT_S)
    struck_s = time.time()
    node.kill()
    return struck_s


def delete_pod(scene: Scene) -> float:
    node = scene.cluster.nodes[1]
    struck_s = time.time()
    node.terminate()
    wait_until(lambda: not node.is_running, "the node's end", WAIT_S)
    node.kill()
    return struck_s


def add_node(scene: Scene) -> float:
    scene.cluster.have_nodes(2)
    return time.time()


def lose_storage(scene: Scene) -> float:
    struck_s = time.time()
    scene.cluster.server.kill()
    end_s = struck_s + scene.options.outage_s
    wait_until(lambda: time.time() >= end_s, "the end of the outage", scene.options.outage_s + 60)
    scene.cluster.server.start()
    return struck_s


@dataclasses.dataclass(frozen=True)
class Row:
    """What is tried."""

    strike: Callable[[Scene], float]
    is_restart: bool = True
    """Whether Ray starts another group because of it."""

    num_nodes: int = 2
    then_workers: int = 2
    """Size of the group that goes on."""


ROWS = {
    "SIGKILL of a worker": Row(kill_worker),
    "SIGKILL of all workers": Row(kill_workers),
    "SIGKILL of all workers and agents": Row(kill_worker_and_agents),
    "SIGKILL of a node": Row(kill_node, then_workers=1),
    "node drained by Ray, killed after 30 s": Row(drain_and_kill_node, then_workers=1),
    "SIGTERM to a node's `ray start --block`": Row(delete_pod, then_workers=1),
    "growth from 1 to 2 workers": Row(add_node, num_nodes=1),
    "SIGINT to the driver, the same command again": Row(interrupt_driver),
    "SIGKILL of the driver, the same command again": Row(kill_driver),
    "SIGKILL of Ray Train's controller, the same command again": Row(kill_controller),
    "SIGKILL of the agents": Row(kill_agents, is_restart=False),
    "SIGKILL of the coordinator": Row(kill_coordinator, is_restart=False),
    "S3 server down": Row(lose_storage, is_restart=False),
}


def play(name: str, row: Row, cluster: Cluster, folder: Path, options: argparse.Namespace) -> Result:
    """Strike one job and see what becomes of it."""
    cluster.have_nodes(row.num_nodes)
    scene = Scene(cluster, folder, options)
    try:
        scene.await_middle(row.num_nodes)
        num_starts, committed = len(scene.starts()), scene.committed()
        struck_s = row.strike(scene)
        if row.is_restart:
            wait_until(lambda: len(scene.starts()) > num_starts, "the first step of the next group", WAIT_S)
            result = _restarted(name, scene.starts(), num_starts, struck_s)
            if result.source == "none":
                result.note = "nothing was restored"
        else:
            wait_until(
                lambda: any(step > max(committed) for step in scene.committed()), "another commit", WAIT_S
            )
            wait_until(lambda: _longest_gap_s(scene.starts()[-1], struck_s) is not None, "steps", WAIT_S)
            result = _undisturbed(name, scene.starts(), num_starts, struck_s)
        if name == "S3 server down":
            result.note = f"for {options.outage_s:.0f} s"
        return result
    finally:
        scene.close()


def _restarted(name: str, starts: list[Start], num_before: int, struck_s: float) -> Result:
    before, after = starts[num_before - 1], starts[num_before]
    restored = after.facts["restored"]
    return Result(
        name,
        lost_steps=before.steps[-1][0] - (restored or 0),
        first_step_s=after.steps[0][1] - struck_s,
        is_restart=True,
        restored=restored,
        source=after.facts["source"] or "none",
        restore_s=after.facts["restore_s"],
    )


def _undisturbed(name: str, starts: list[Start], num_before: int, struck_s: float) -> Result:
    assert len(starts) == num_before, "a group was started that should not have been"
    return Result(
        name,
        lost_steps=0,
        first_step_s=_longest_gap_s(starts[-1], struck_s) or 0.0,
        is_restart=False,
        restored=None,
        source="-",
        restore_s=None,
        note="",
    )


def _longest_gap_s(start: Start, struck_s: float) -> float | None:
    """Return the longest time between the ends of two steps from the strike on; None: there are too few."""
    ends = [end for _, end in start.steps]
    first = next((i for i, end in enumerate(ends) if end >= struck_s), len(ends))
    if len(ends) - first < 20:
        return None
    return max(b - a for a, b in zip(ends[max(first - 1, 0) :], ends[first or 1 :], strict=False))


def table(results: list[Result]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| what happens | steps lost | seconds to the first new step | restored | from | of these seconds, restore |",
        "|---|--:|--:|--:|---|--:|",
    ]
    for result in results:
        note = f" ({result.note})" if result.note else ""
        if result.is_restart:
            cells = [
                f"{result.first_step_s:.1f}",
                f"step {result.restored}" if result.restored is not None else "nothing",
                result.source,
                f"{result.restore_s:.2f}" if result.restore_s is not None else "",
            ]
        else:
            cells = [f"{result.first_step_s:.2f}, longest step", "training goes on", "", ""]
        lines.append("| " + " | ".join([result.name + note, str(result.lost_steps), *cells]) + " |")
    return "\n".join(lines)


@contextlib.contextmanager
def make_cluster(folder: Path) -> Iterator[Cluster]:
    """Start head node and S3 server, connect this process, and end all of it."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    server = RestartableServer(folder / "s3")
    try:
        with head_node(folder / "head") as head:
            cluster = Cluster(head, server, folder)
            ray.init(address=head.address, log_to_driver=False, configure_logging=False)
            try:
                yield cluster
            finally:
                for node in cluster.nodes:
                    node.kill()
                ray.shutdown()
    finally:
        server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME")
    parser.add_argument("--mb", type=float, default=100.0, help="size of a checkpoint")
    parser.add_argument("--outage-s", type=float, default=300.0)
    parser.add_argument(
        "--log", type=Path, help="append one JSON line for each row, and leave out rows that are there"
    )
    parser.add_argument("--document", type=Path, help="write the table between its markers in this file")
    options = parser.parse_args()
    results = _read_log(options.log)
    folder = Path(tempfile.mkdtemp(prefix="raycheck-recovery-"))
    todo = [name for name in options.row if name not in {result.name for result in results}]
    if todo:
        with make_cluster(folder) as cluster:
            for number, name in enumerate(todo):
                result = play(name, ROWS[name], cluster, folder / f"job{number}", options)
                results.append(result)
                print(table([result]).splitlines()[-1], flush=True)
                if options.log:
                    with options.log.open("a") as log:
                        print(json.dumps(dataclasses.asdict(result)), file=log)
    results.sort(key=lambda result: list(ROWS).index(result.name))
    print(table(results))
    if options.document:
        _write_into(options.document, table(results))
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _read_log(path: Path | None) -> list[Result]:
    if path is None or not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def _write_into(document: Path, text: str) -> None:
    begin, end = "<!-- the table -->\n", "<!-- end of the table -->"
    before, _, rest = document.read_text().partition(begin)
    _, _, after = rest.partition(end)
    document.write_text(f"{before}{begin}{text}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
