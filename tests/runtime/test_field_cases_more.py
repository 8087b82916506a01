"""Field cases that only a whole run shows: real agents, workers and stores, each fault known to have fired."""

from __future__ import annotations

import datetime
import errno
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import raycheck
from raycheck.runtime.agent import Limits
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.run import RunStore
from raycheck.testing import Fault, FaultyConnect, s3_error
from tests.runtime import harness, jobs
from tests.runtime.harness import LocalCluster, processes, wait_until

_FAST = RetryPolicy(budget_s=0.2, first_delay_s=0.01, max_delay_s=0.05)


class FailWhile(Fault):
    """Writes of keys that contain a text fail while a file exists; it says so in another."""

    def __init__(self, flag: Path, part_of_key: str, error: Exception) -> None:
        super().__init__("write", "begin", "part", "complete")
        self._flag, self._part_of_key, self._error = flag, part_of_key, error

    def before(self, operation: str, key: str) -> None:
        if self.applies_to(operation) and self._part_of_key in key and self._flag.exists():
            self.fired()
            self._flag.with_suffix(".fired").touch()
            raise self._error


class Slow(Fault):
    """Reads and writes of one shard take longer; each says so in a file."""

    def __init__(self, folder: Path, delay_s: float) -> None:
        super().__init__("write", "begin", "read")
        self._folder, self._delay_s = folder, delay_s

    def before(self, operation: str, key: str) -> None:
        if self.applies_to(operation) and "/shard-00000-of-" in key and key.endswith(".safetensors"):
            (self._folder / f"slow.{operation}").touch()
            time.sleep(self._delay_s)


class Gate(Fault):
    """Deletions wait until it is opened; then the first ones fail."""

    def __init__(self, num_failures: int) -> None:
        super().__init__("delete")
        self.opened = threading.Event()
        self._num_failures = num_failures

    def before(self, operation: str, key: str) -> None:
        if self.applies_to(operation):
            number = self.count_call()
            self.opened.wait(120)
            if number <= self._num_failures:
                self.fired()
                raise s3_error("AccessDenied", 403)


def _agent_main(fault, *arguments) -> None:
    """The harness's agent over a store with a fault, which is made here: it has a lock."""
    kind, *values = fault
    connect = FaultyConnect(kind(*values))
    harness.Store = functools.partial(Store, retry=_FAST, connect=connect)  # type: ignore[misc,assignment]
    harness._agent_main(*arguments)


class FaultyCluster(LocalCluster):
    """A run whose agents, or some of them, have a faulty store."""

    def __init__(self, url, *, faults, **settings) -> None:
        self._faults = faults
        super().__init__(url, num_nodes=len(faults), **settings)

    def start_agent(self, node: str) -> None:
        fault = self._faults[self.nodes.index(node)]
        if fault is None:
            super().start_agent(node)
            return
        self._pipes.pop(("orders", node), None)
        limits = Limits(bytes_per_s=self.settings.upload_bytes_per_s)
        place = (node, self.addresses[node], self.url, self.options, self._listener.address, limits)
        agent = processes.Process(target=_agent_main, args=(fault, *place), daemon=True)
        agent.start()
        self.agents[node] = agent
        wait_until(lambda: ("orders", node) in self._pipes, f"agent {node}")


@pytest.fixture
def close():
    """Close clusters after the test."""
    clusters = []
    yield lambda cluster: clusters.append(cluster) or cluster
    for cluster in clusters:
        cluster.close()


SETTINGS = {"interval_steps": 1_000_000, "telemetry": False}


def pausing(tmp_path, step, **config):
    return {"steps": 30, "pause_at": step, "pause_file": str(tmp_path / "go"), **config}


def has_paused(tmp_path):
    return lambda: (tmp_path / "go.reached0").exists()


class TestC2TheOldOneStaysUntilTheNewOneIsThere:
    """keep_last=1: there is never a moment without a checkpoint."""

    def test_a_failed_upload(self, tmp_path, close):
        """The shard of step 20 is refused: step 10 stays, and restores."""
        flag = tmp_path / "broken"
        flag.touch()
        fault = (FailWhile, flag, "step-0000000020", s3_error("AccessDenied", 403))
        cluster = close(FaultyCluster(str(tmp_path / "run"), faults=[fault], keep_last=1, **SETTINGS))
        self._fail_then_restore(cluster, tmp_path)
        assert flag.with_suffix(".fired").exists()

    def test_a_failed_commit(self, tmp_path, close):
        """The manifest of step 20 is refused."""
        flag = tmp_path / "broken"
        flag.touch()
        fault = FailWhile(flag, "step-0000000020", s3_error("AccessDenied", 403))
        cluster = close(LocalCluster(str(tmp_path / "run"), keep_last=1, **SETTINGS))
        cluster.run_store = RunStore(Store(cluster.url, retry=_FAST, connect=FaultyConnect(fault)))
        cluster.replace_coordinator()
        self._fail_then_restore(cluster, tmp_path)
        assert fault.num_fired > 0

    @staticmethod
    def _fail_then_restore(cluster, tmp_path):
        first = cluster.start(jobs.train, pausing(tmp_path, 25, save_at=[10, 20]), world_size=1)
        wait_until(has_paused(tmp_path), "step 25")
        assert cluster.committed_steps() == [10]
        first.kill_all()
        (result,) = cluster.start(jobs.train, {"steps": 12}, world_size=1).results()
        assert result["restored"] == 10


def test_c5_deletions_that_hang_and_fail_delay_nothing(tmp_path, close):
    """Five saves commit while the first deletion hangs; failed ones are made up for by later rotations."""
    gate = Gate(num_failures=2)
    cluster = close(LocalCluster(str(tmp_path / "run"), keep_last=1, **SETTINGS))
    cluster.run_store = RunStore(Store(cluster.url, retry=_FAST, connect=FaultyConnect(gate)))
    cluster.replace_coordinator()
    try:
        config = pausing(tmp_path, 11, save_at=[2, 4, 6, 8, 10])
        generation = cluster.start(jobs.train, config, world_size=1)
        wait_until(has_paused(tmp_path), "the fifth save")
        assert gate.num_calls > 0, "a deletion is under way"
        assert cluster.committed_steps() == [2, 4, 6, 8, 10]
    finally:
        gate.opened.set()
    (tmp_path / "go").touch()
    assert "digest" in generation.results()[0], "training has seen no error"
    wait_until(lambda: cluster.committed_steps() == [30], "the old ones to go")
    assert gate.num_fired == 2


def step_alone(config):
    """Step without any exchange between the ranks; one waits for a file before a step."""
    model = torch.nn.Linear(2, 2)
    torch.manual_seed(0)
    ckpt = raycheck.attach(model=model)
    for step in range(config["steps"]):
        if step == config.get("pause_at") and config["rank"] == config["pause_rank"]:
            Path(config["pause_file"] + f".reached{config['rank']}").touch()
            jobs.wait_for(config["pause_file"])
        time.sleep(0.01)  # a step
        ckpt.step()
        if config["rank"] == 0:
            # Whole at once: the test reads it at any moment.
            fresh = Path(config["progress"]).with_suffix(".new")
            fresh.write_text(str(step))
            fresh.rename(config["progress"])
    return ckpt.current_step


def test_h1_a_rank_that_does_not_come_is_named_and_holds_nobody_up(tmp_path, close, caplog):
    """The others go on; the attempt ends with the rank's number; when it is back, the next one commits."""
    cluster = close(LocalCluster(str(tmp_path / "run"), interval_steps=20, telemetry=False))
    progress = tmp_path / "progress"
    config = {
        "steps": 3000,
        "pause_at": 30,
        "pause_rank": 2,
        "pause_file": str(tmp_path / "go"),
        "progress": str(progress),
    }
    cluster.start(step_alone, config, world_size=3)
    wait_until(lambda: (tmp_path / "go.reached2").exists(), "rank 2 to stand still")
    committed = cluster.committed_steps()
    with caplog.at_level("INFO", logger="raycheck"):
        wait_until(lambda: "rank 2" in caplog.text or "ranks 2" in caplog.text, "the missing rank's name")
    before = int(progress.read_text())
    wait_until(lambda: int(progress.read_text()) > before + 20, "rank 0 to go on")
    assert cluster.committed_steps() == committed, "no checkpoint lacks a rank"
    (tmp_path / "go").touch()
    wait_until(lambda: len(cluster.committed_steps()) > len(committed), "the next checkpoint")


def with_short_timeout(config):
    """Train with a process group that gives up after some seconds without an answer."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{config['group_file']}",
        rank=config["rank"],
        world_size=config["world_size"],
        timeout=datetime.timedelta(seconds=8),
    )
    return jobs.train(config)


def test_h3_slow_storage_on_one_node_trips_no_watchdog(tmp_path, close):
    """Saving and restoring take one node longer than the process group's timeout, and nobody notices."""
    cluster = close(FaultyCluster(str(tmp_path / "run"), faults=[(Slow, tmp_path, 10.0), None], **SETTINGS))
    for number, steps in ((1, 5), (2, 8)):
        config = {"steps": steps, "group_file": str(tmp_path / f"group{number}")}
        results = cluster.start(with_short_timeout, config, world_size=2).results(120)
    assert (tmp_path / "slow.write").exists() or (tmp_path / "slow.begin").exists()
    assert (tmp_path / "slow.read").exists()
    assert [result["restored"] for result in results] == [5, 5]
    assert cluster.committed_steps() == [5, 8]


def with_another_clock(config):
    """Train in a process whose clock of the day is off, and on one rank jumps back on the way."""
    offset_s = {0: 0.0, 1: 40.0, 2: -3600.0}[config["rank"]]
    true_time, num_calls = time.time, iter(range(10**9))

    def wrong_time():
        return true_time() + offset_s - (1000.0 if config["rank"] == 1 and next(num_calls) > 20 else 0.0)

    time.time = wrong_time
    try:
        return jobs.train(config)
    finally:
        time.time = true_time


def test_j1_clocks_that_disagree_change_nothing(tmp_path, close):
    """The interval is in seconds, by one clock: all ranks save the same steps, none twice."""
    stop = tmp_path / "stop"
    limits = {"min_interval_s": 0.5, "max_interval_s": 0.5}
    cluster = close(LocalCluster(str(tmp_path / "run"), keep_last=1000, telemetry=False, **limits))
    generation = cluster.start(with_another_clock, {"steps": 10**6, "stop_file": str(stop)}, world_size=3)
    wait_until(lambda: len(cluster.committed_steps()) >= 3, "three commits", 120)
    stop.touch()
    assert len({result["digest"] for result in generation.results()}) == 1
    steps = cluster.committed_steps()
    assert len(set(steps)) == len(steps)
    refs = cluster.run_store.attempts()
    assert [ref.step for ref in refs] == steps, "no attempt is left that some ranks made alone"
    assert {cluster.run_store.read_manifest(ref).world_size for ref in refs} == {3}


def train_then_raise(config):
    """Train until told to stop, and end in an error."""
    jobs.train(config)
    raise {"error": ValueError("the user's own"), "exit": SystemExit(3)}[config["end"]]


@pytest.mark.parametrize(
    ("end", "told"), [("error", "ValueError: the user's own"), ("exit", "SystemExit: 3")]
)
def test_m3_what_is_under_way_when_training_ends_in_an_error_is_stored(tmp_path, close, end, told):
    """The error comes out as it was, and the snapshot that was complete is committed afterwards."""
    stop = tmp_path / "stop"
    cluster = close(
        LocalCluster(str(tmp_path / "run"), interval_steps=1, upload_bytes_per_s=200_000, telemetry=False)
    )
    config = {"steps": 10_000, "width": 4096, "stop_file": str(stop), "end": end}
    generation = cluster.start(train_then_raise, config, world_size=2)

    def staged_plan():
        commits = cluster.coordinator._generation.commits
        return commits.plan if commits and commits.is_fully_staged else None

    plan = wait_until(staged_plan, "a snapshot whose upload takes seconds")
    stop.touch()
    assert [outcome["error"] for outcome in generation.outcomes()] == [told, told]
    wait_until(lambda: plan.step in cluster.committed_steps(), "the commit of what was under way")


def test_n1_a_full_disk_costs_one_save(tmp_path, close, caplog):
    """The save fails softly, training goes on, and with space again the next one commits."""
    flag = tmp_path / "full"
    flag.touch()
    fault = (FailWhile, flag, ".safetensors", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    cluster = close(FaultyCluster(str(tmp_path / "run"), faults=[fault], **SETTINGS))
    with caplog.at_level("WARNING", logger="raycheck"):
        generation = cluster.start(jobs.train, pausing(tmp_path, 15, save_at=[10, 20]), world_size=1)
        wait_until(has_paused(tmp_path), "step 15")
    assert flag.with_suffix(".fired").exists()
    assert cluster.committed_steps() == []
    assert "No space left" in caplog.text
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and "step-" in str(path)]
    assert left == [], "nothing of the failed save is left"
    flag.unlink()
    (tmp_path / "go").touch()
    generation.results()
    assert cluster.committed_steps() == [20, 30]


def save_twice(config):
    """Save a step, and once more."""
    ckpt = raycheck.attach(model=torch.nn.Linear(2, 2))
    ckpt.step()
    return [ckpt.save(block=True), ckpt.save(block=True), ckpt.current_step]


def test_a6_a_step_that_is_committed_may_be_saved_again(tmp_path, close):
    """No refusal and no hang: another attempt at the same step has keys of its own."""
    cluster = close(LocalCluster(str(tmp_path / "run"), **SETTINGS))
    results = cluster.start(save_twice, world_size=2).results()
    assert results == [[True, True, 1]] * 2
    assert set(cluster.committed_steps()) == {1}


_SCRATCH = """
import sys
import tempfile
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster, wait_until
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for start in range(2):
        cluster = LocalCluster(str(folder / "run"), interval_steps=1, telemetry=False)
        before = cluster.committed_steps()
        generation = cluster.start(jobs.train, {"steps": 10**6}, world_size=1)
        wait_until(lambda: len(set(cluster.committed_steps()) - set(before)) >= 2, "two saves")
        generation.kill_all()
        cluster.kill_agent("node0")
        cluster.close()
    print("done")
"""


def test_n2_nothing_piles_up_outside_the_store(tmp_path):
    """Saves, restores and SIGKILLs leave nothing in the folder for temporary files, nor in /dev/shm."""
    # Of its own: below pytest's folder a socket's path may become too long.
    scratch, script = Path(tempfile.mkdtemp(prefix="rn2-")), tmp_path / "runs.py"
    script.write_text(textwrap.dedent(_SCRATCH))
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr[-3000:]
    # Python's own for processes, and torch's for its compiler.
    others = ("pymp-", "torch")
    left = [entry.name for entry in scratch.iterdir() if not entry.name.startswith(others)]
    shutil.rmtree(scratch)
    assert left == []
    assert [name for name in os.listdir("/dev/shm") if "raycheck" in name] == []
