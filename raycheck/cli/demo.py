"""``raycheck demo``: a real job that is killed twice and ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from raycheck.core.layout import ROOT
from raycheck.observe.events import read_events
from raycheck.runtime.callback import join_url
from raycheck.store.objects import Store

NUM_WORKERS = 2
GLOBAL_BATCH = 16
NUM_EPOCHS = 2
MAX_OVERHEAD = 0.035

_START_TIMEOUT_S = 180.0
_STEP_TIMEOUT_S = 120.0
_POLL_S = 0.02


class DemoError(Exception):
    """The demo cannot go on; the message says why and where to look."""


def demo(
    storage: Annotated[
        str | None,
        typer.Option(help="Where checkpoints go: a folder or an s3:// URL.", show_default="./raycheck-demo"),
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples per epoch.", min=400)] = 4001,
) -> None:
    """Train a small GPT, kill a worker, kill the whole job, and check that nothing was lost.

    Uses two CPU workers on a local Ray, and takes about two minutes.

    Examples:
      raycheck demo
      raycheck demo --storage s3://bucket/raycheck-demo
    """
    console = Console()
    folder = Path("raycheck-demo").resolve()
    try:
        with _interrupts(), _Demo(console, folder, storage or str(folder / "storage"), samples) as job:
            passed = job.run()
    except DemoError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("interrupted: all processes of the demo have been ended")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if passed else 1)


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Have SIGTERM end the demo as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """One kill and what came after it."""

    what: str
    killed_unix_s: float
    reached_step: int
    restored_step: int
    started_unix_s: float
    first_step_unix_s: float
    raycheck_s: float

    @property
    def lost_steps(self) -> int:
        """Steps that had to be taken again."""
        return self.reached_step - self.restored_step

    @property
    def total_s(self) -> float:
        """From the kill to the end of the first new step."""
        return self.first_step_unix_s - self.killed_unix_s


class Records:
    """The lines that the workers of one run write, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self._positions: dict[Path, int] = {}

    def read(self) -> None:
        """Take in what is new."""
        for path in sorted(self.folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._positions.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._positions[path] = self._positions.get(path, 0) + len(whole)
            rank = int(path.name.split("-")[0].removeprefix("rank"))
            self.lines += [{"rank": rank, **json.loads(line)} for line in whole.splitlines()]

    @property
    def last_step(self) -> int:
        """The step that the run has reached, as rank 0 wrote it last."""
        return next((x["step"] for x in reversed(self.lines) if x["event"] == "step" and x["rank"] == 0), 0)

    def events(self, event: str, after_unix_s: float = 0.0) -> list[dict[str, Any]]:
        """Return lines of one kind written after a time, oldest first."""
        found = [x for x in self.lines if x["event"] == event and x["unix_s"] > after_unix_s]
        return sorted(found, key=lambda x: x["unix_s"])

    def surviving(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the step lines by (step, rank) that count: a step taken again replaces the lost one."""
        return {(x["step"], x["rank"]): x for x in self.events("step")}


class _Demo:
    """The demo's processes; leaving it ends them all."""

    def __init__(self, console: Console, folder: Path, storage: str, num_samples: int) -> None:
        self._console = console
        self._folder = folder
        self._storage = storage
        self._num_samples = num_samples
        self._num_steps = NUM_EPOCHS * -(-num_samples // GLOBAL_BATCH)
        self._name = f"gpt-{time.strftime('%Y%m%d-%H%M%S')}"
        self._run_folder = folder / self._name
        self._run_folder.mkdir(parents=True)
        # Short, since Unix sockets lie in it; and ours alone, so that it can go.
        self._ray_folder = tempfile.mkdtemp(prefix="raycheck-demo-")
        self._head: subprocess.Popen[bytes] | None = None
        self._driver: subprocess.Popen[bytes] | None = None
        self._address = ""

    def __enter__(self) -> _Demo:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._driver, self._head):
            if process is not None:
                _end(process)
        shutil.rmtree(self._ray_folder, ignore_errors=True)

    def run(self) -> bool:
        """Run all of it; return whether every check passed."""
        print_ = self._console.print
        print_(
            f"a small GPT on the source of Python's standard library: {NUM_WORKERS} workers, {self._num_steps} steps"
        )
        print_(f"checkpoints go to {self._storage}", soft_wrap=True)
        print_(f"logs are in {self._run_folder}", soft_wrap=True)
        self._start_head()
        with self._progress() as progress:
            reference = self._undisturbed(progress)
            records = self._records("run")
            bar = progress.add_task("with failures", total=self._num_steps)
            self._start_driver("run", self._name)
            first = self._kill_worker(records, progress, bar)
            second = self._kill_driver(records, progress, bar)
            self._finish(records, progress, bar)
            progress.update(bar, description="with failures: done")
        return self._judge(reference, records, [first, second])

    # Processes.

    def _environment(self) -> dict[str, str]:
        # A token left by another Ray on this machine would be asked for.
        return {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0", "PYTHONUNBUFFERED": "1"}

    def _spawn(self, log: str, *command: str) -> subprocess.Popen[bytes]:
        with (self._run_folder / log).open("ab") as file:
            # In a session of its own, so that Ctrl-C reaches this process alone.
            return subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=self._environment(),
                start_new_session=True,
            )

    def _start_head(self) -> None:
        port = _free_port()
        self._address = f"127.0.0.1:{port}"
        ray = str(Path(sys.executable).with_name("ray"))
        options = [
            "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=8", "--num-gpus=0",
            "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=200000000",
            f"--temp-dir={self._ray_folder}",
        ]  # fmt: skip
        self._head = self._spawn("ray.log", ray, "start", *options)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _answers(port):
            if self._head.poll() is not None or time.monotonic() > deadline_s:
                raise DemoError(f"Ray did not start; see {self._run_folder / 'ray.log'}")
            time.sleep(_POLL_S)

    def _start_driver(self, records: str, name: str, *options: str) -> None:
        self._driver = self._spawn(
            f"{records}.log", sys.executable, "-m", "raycheck.cli.demo_train",
            "--address", self._address, "--name", name, "--storage", self._storage,
            "--records", str(self._run_folder / records), "--num-samples", str(self._num_samples), *options,
        )  # fmt: skip

    def _records(self, name: str) -> Records:
        (self._run_folder / name).mkdir()
        return Records(self._run_folder / name)

    # What happens, in order.

    def _undisturbed(self, progress: Progress) -> Records:
        records = self._records("reference")
        bar = progress.add_task("undisturbed, no checkpoints", total=self._num_steps)
        self._start_driver("reference", f"{self._name}-reference", "--reference")
        self._finish(records, progress, bar)
        return records

    def _kill_worker(self, records: Records, progress: Progress, bar: TaskID) -> Failure:
        self._watch(records, progress, bar, until_step=int(0.45 * self._num_steps))
        victim = next(x for x in reversed(records.lines) if x["event"] == "step" and x["rank"] == 1)
        return self._kill("a worker", victim["pid"], records, progress, bar)

    def _kill_driver(self, records: Records, progress: Progress, bar: TaskID) -> Failure:
        self._watch(records, progress, bar, until_step=int(0.8 * self._num_steps))
        assert self._driver is not None
        return self._kill("the whole job", self._driver.pid, records, progress, bar)

    def _kill(self, what: str, pid: int, records: Records, progress: Progress, bar: TaskID) -> Failure:
        os.kill(pid, signal.SIGKILL)
        killed_unix_s = time.time()
        records.read()
        reached_step = records.last_step
        progress.console.print(f"step {reached_step}: SIGKILL to {what} (process {pid})")
        if self._driver is not None and pid == self._driver.pid:
            self._driver.wait()
            progress.console.print("           the same command again")
            self._start_driver("run", self._name)
        progress.update(bar, description=f"with failures: after {what}")
        self._wait(records, lambda: len(records.events("step", self._attached_s(records, killed_unix_s))) > 0)
        attached = records.events("attached", killed_unix_s)[-1]
        failure = Failure(
            what=what,
            killed_unix_s=killed_unix_s,
            reached_step=reached_step,
            restored_step=attached["step"],
            started_unix_s=records.events("start", killed_unix_s)[-1]["unix_s"],
            first_step_unix_s=records.events("step", attached["unix_s"])[0]["unix_s"],
            raycheck_s=attached["seconds"],
        )
        progress.console.print(
            f"           resumed at step {failure.restored_step} after {failure.total_s:.1f} s, "
            f"{failure.lost_steps} steps to take again"
        )
        return failure

    @staticmethod
    def _attached_s(records: Records, after_unix_s: float) -> float:
        attached = records.events("attached", after_unix_s)
        return float(attached[-1]["unix_s"]) if len(attached) >= NUM_WORKERS else float("inf")

    def _watch(self, records: Records, progress: Progress, bar: TaskID, *, until_step: int) -> None:
        def has_reached() -> bool:
            progress.update(bar, completed=records.last_step)
            return records.last_step >= until_step

        self._wait(records, has_reached)

    def _finish(self, records: Records, progress: Progress, bar: TaskID) -> None:
        self._watch(records, progress, bar, until_step=self._num_steps)
        assert self._driver is not None
        try:
            code = self._driver.wait(_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the job does not end; see the logs in {self._run_folder}") from None
        if code != 0:
            raise DemoError(f"the job ended with exit code {code}; see the logs in {self._run_folder}")
        records.read()  # Rank 0 was at its end; the other ranks may have written since.

    def _wait(self, records: Records, condition: Any) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        seen = 0
        while True:
            # Asked before reading: what an ended job wrote is all there then.
            has_ended = self._driver is not None and self._driver.poll() is not None
            records.read()
            if condition():
                return
            if len(records.lines) != seen:
                seen, deadline_s = len(records.lines), time.monotonic() + _STEP_TIMEOUT_S
            if has_ended:
                raise DemoError(f"the job ended too early; see the logs in {self._run_folder}")
            if time.monotonic() > deadline_s:
                raise DemoError(f"the job makes no progress; see the logs in {self._run_folder}")
            time.sleep(_POLL_S)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description:<32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )

    # What came of it.

    def _judge(self, reference: Records, records: Records, failures: list[Failure]) -> bool:
        checks = [
            _check_losses(reference, records, self._num_steps),
            _check_samples(records, self._num_samples),
        ]
        events = read_events(Store(join_url(self._storage, f"{self._name}/{ROOT}")))
        print_ = self._console.print
        print_("")
        for failure in failures:
            print_(f"SIGKILL to {failure.what}: {failure.lost_steps} steps taken again")
            print_(f"  {failure.total_s:4.1f} s from the kill to the end of the first new step, of which")
            for seconds, what in _restart_times(failure, events):
                print_(f"  {seconds:4.1f} s {what}")
        checkpoints = [event for event in events if event["kind"] == "checkpoint"]
        stalls_ms = sorted(1e3 * event["facts"]["stall_s"] for event in checkpoints)
        stall_ms = stalls_ms[len(stalls_ms) // 2]
        print_(f"{len(checkpoints)} checkpoints, each stalled training for {stall_ms:.1f} ms (median)")
        cost_s, inside_s = _measured_cost(events)
        overhead = cost_s / inside_s if inside_s else 0.0
        print_(f"measured overhead {overhead:.2%} of training time; the bound is {MAX_OVERHEAD:.1%}")
        checks.append((overhead <= MAX_OVERHEAD, "the measured overhead is within the bound"))
        for passed, text in checks:
            print_(("[green]ok[/green]      " if passed else "[red]FAILED[/red]  ") + text)
        return all(passed for passed, _ in checks)


def _check_losses(reference: Records, records: Records, num_steps: int) -> tuple[bool, str]:
    wanted, found = reference.surviving(), records.surviving()
    keys = [(step, rank) for step in range(1, num_steps + 1) for rank in range(NUM_WORKERS)]
    if sorted(wanted) != keys:
        return False, f"the undisturbed run has {len(wanted)} losses, not {len(keys)}"
    different = [key for key in keys if key not in found or found[key]["loss"] != wanted[key]["loss"]]
    if different:
        return (
            False,
            f"{len(different)} losses differ, first at step {different[0][0]}, rank {different[0][1]}",
        )
    return True, f"all {len(keys)} losses are those of the undisturbed run, bit for bit"


def _check_samples(records: Records, num_samples: int) -> tuple[bool, str]:
    used: list[Counter[int]] = [Counter() for _ in range(NUM_EPOCHS)]
    for line in records.surviving().values():
        used[line["epoch"]].update(line["samples"])
    for epoch, counts in enumerate(used):
        wrong = [index for index in range(num_samples) if counts[index] != 1]
        if wrong or len(counts) != num_samples:
            return False, f"epoch {epoch}: {len(wrong)} of {num_samples} samples were not used exactly once"
    return True, f"each of {num_samples} samples was used exactly once in each of {NUM_EPOCHS} epochs"


def _restart_times(failure: Failure, events: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Return where the time from a kill to the first new step went."""
    begun = [e for e in events if e["kind"] == "begun" and e["unix_s"] > failure.killed_unix_s]
    ours_s = begun[0]["facts"]["seconds"] if begun else 0.0
    ray_s = failure.started_unix_s - failure.killed_unix_s - ours_s
    return [
        (ray_s, "Ray's own restart: noticing the death, new processes, process group"),
        (ours_s + failure.raycheck_s, "raycheck: claiming the generation, restoring and verifying"),
        (
            failure.total_s - ray_s - ours_s - failure.raycheck_s,
            "the job's own: building the model, a first step",
        ),
    ]


def _measured_cost(events: list[dict[str, Any]]) -> tuple[float, float]:
    """Return what checkpoints cost and the time inside steps, over all coordinators of the run."""
    last: dict[str, dict[str, Any]] = {}
    for event in events:
        if "inside_steps_s" in event["facts"]:
            last[event["writer"]] = event["facts"]
    return (
        sum(facts["cost_s"] for facts in last.values()),
        sum(facts["inside_steps_s"] for facts in last.values()),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, those first that could start others again."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        process.poll()
        return
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)
    process.poll()
