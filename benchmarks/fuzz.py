"""Fuzz every parser of bytes that come from a store, a socket or the environment; print what came of it.

    python benchmarks/fuzz.py --inputs 10_000_000 --parser manifest
    python benchmarks/fuzz.py --replay FILE

Each parser runs in processes of its own, on inputs that are made from valid
ones and that its seed decides. What is no documented error is a crash, and so is
the end of a process; an input that takes more than 5 s of CPU time is a hang. Its
bytes are saved and run again with --replay. A process may take 1 GiB of address
space beyond what it has at its first input.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fuzz import engine, targets
from tests.fuzz.engine import Outcome
from tests.fuzz.mutate import MAX_INPUT_BYTES

_POLL_S = 0.5
_STALLED_S = 300.0
"""Without any input done: the process waits for something, which takes no CPU time."""

_MAX_DEATHS = 20
"""Of one parser's processes; a parser that dies more often is mended first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--inputs", type=lambda text: int(text.replace("_", "")), default=100_000, help="for each parser"
    )
    parser.add_argument("--parser", nargs="+", choices=sorted(targets.TARGETS), default=list(targets.TARGETS))
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="of processor time, most for each process of a parser"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", default="0")
    parser.add_argument(
        "--faults", type=Path, default=Path("fuzz-faults"), help="folder for inputs that did harm"
    )
    parser.add_argument("--log", type=Path, help="append one JSON line for each parser")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="print the table of these logs and do nothing else"
    )
    parser.add_argument("--replay", type=Path, help="run one saved input and tell what happens")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options)
    if options.replay:
        return replay(options.replay)
    if options.table:
        lines = [line for log in options.table for line in log.read_text().splitlines()]
        outcomes = merged(map(engine.from_json, lines))
    else:
        outcomes = []
        for name in options.parser:
            outcomes.append(run(name, options))
            print(table(outcomes[-1:]).splitlines()[-1], flush=True)
            if options.log:
                with options.log.open("a") as log:
                    print(engine.to_json(outcomes[-1]), file=log)
    print(table(outcomes))
    return 1 if any(outcome.crashes or outcome.hangs for outcome in outcomes) else 0


def run(name: str, options: argparse.Namespace) -> Outcome:
    """Run one parser in parallel processes until its inputs or its time are used up."""
    total = Outcome(name)
    num_processes = max(1, min(options.processes, options.inputs))
    with tempfile.TemporaryDirectory(prefix="raycheck-fuzz-") as folder:
        children = [
            Child(
                name, f"{options.seed}.{i}", options.inputs // num_processes, Path(folder) / str(i), options
            )
            for i in range(num_processes)
        ]
        while any(child.is_running for child in children):
            time.sleep(_POLL_S)
            for each in children:
                each.look()
        for each in children:
            total.add(each.outcome)
    return total


class Child:
    """The inputs of one process, and of its successors where it died."""

    def __init__(
        self, name: str, seed: str, num_inputs: int, place: Path, options: argparse.Namespace
    ) -> None:
        self.outcome = Outcome(name)
        self.is_running = True
        self._seed, self._num_inputs, self._place, self._options = seed, num_inputs, place, options
        self._num_deaths = 0
        self._start()

    def _start(self) -> None:
        self._pad_path = self._place.with_suffix(f".{self._num_deaths}")
        self._pad = engine.Pad(self._pad_path, max_bytes=MAX_INPUT_BYTES)
        self._seen, self._num_looks, self._used_s = -1, 0, 0.0
        self._process = subprocess.Popen(
            [
                *(sys.executable, __file__, "--child", self.outcome.parser),
                *("--seed", f"{self._seed}.{self._num_deaths}"),
                *("--inputs", str(self._num_inputs - self.outcome.inputs)),
                *("--seconds", str(self._options.seconds - self.outcome.seconds)),
                *("--faults", str(self._options.faults), "--log", str(self._pad_path)),
            ],
            # It ends without cleaning up, or is ended: its files go with the driver's.
            env={**os.environ, "TMPDIR": str(self._place.parent)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def look(self) -> None:
        """See how far it is; start a successor where it has died."""
        if not self.is_running:
            return
        data, inputs, accepted, refused = self._pad.read()
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(self._process.pid).cpu_times()
            self._used_s = times.user + times.system
        if self._process.poll() is None:
            if inputs != self._seen:
                self._seen, self._num_looks = inputs, 0
            # Looks, no clock: who stops this tool for a while stops its processes too.
            elif self._num_looks * _POLL_S > _STALLED_S:
                self._process.kill()
            self._num_looks += 1
            return
        output = self._process.stdout.read() if self._process.stdout else ""
        if self._process.returncode == 0:
            self.outcome.add(engine.from_json(output.splitlines()[-1]))
            self.is_running = False
            return
        died = Outcome(
            self.outcome.parser, inputs=inputs + 1, seconds=self._used_s, accepted=accepted, refused=refused
        )
        number = -self._process.returncode
        kind = signal.Signals(number).name if number > 0 else f"exit{self._process.returncode}"
        if number in (signal.SIGPROF, signal.SIGKILL):
            died.hangs = 1
        else:
            died.crashes = 1
        died.faults[f"the process ended: {kind}"] = 1
        engine.save(self._options.faults, self.outcome.parser, kind, data, "")
        self.outcome.add(died)
        self._num_deaths += 1
        is_over = self.outcome.inputs >= self._num_inputs or self.outcome.seconds >= self._options.seconds
        self.is_running = not is_over and self._num_deaths < _MAX_DEATHS
        if self.is_running:
            self._start()


def child(name: str, options: argparse.Namespace) -> int:
    """Run inputs in this process; the driver reads the outcome from the last line."""
    pad = engine.Pad(options.log, max_bytes=MAX_INPUT_BYTES)
    outcome = engine.fuzz(
        name,
        seed=options.seed,
        num_inputs=options.inputs,
        seconds=options.seconds,
        folder=options.faults,
        pad=pad,
    )
    print(engine.to_json(outcome), flush=True)
    # Threads of libraries and of the agent have nothing more to do.
    os._exit(0)


def replay(path: Path) -> int:
    """Run one saved input, whose name begins with its parser's."""
    target = targets.build(path.name.partition("-")[0])
    begun_s = time.thread_time()
    try:
        is_accepted = target.parse(path.read_bytes())
        target.settle()
    except Exception:  # noqa: BLE001  what it is, is what one wants to see
        traceback.print_exc()
        return 1
    print("accepted" if is_accepted else "refused", f"in {time.thread_time() - begun_s:.3f} s of CPU time")
    return 0


def merged(outcomes: object) -> list[Outcome]:
    """Return one outcome for each parser."""
    by_name: dict[str, Outcome] = {}
    for outcome in outcomes:  # type: ignore[attr-defined]
        by_name.setdefault(outcome.parser, Outcome(outcome.parser)).add(outcome)
    return [by_name[name] for name in targets.TARGETS if name in by_name]


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a table in Markdown, and below it what went wrong."""
    rows = [
        "| parser | inputs | seconds | accepted | refused | crashes | hangs | slowest, s of CPU | memory grown, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows += [
        f"| {o.parser} | {o.inputs:,} | {o.seconds:,.0f} | {o.accepted:,} | {o.refused:,} | {o.crashes} | {o.hangs} "
        f"| {o.slowest_s:.2f} | {o.grown_bytes / (1 << 20):.0f} |"
        for o in outcomes
    ]
    for outcome in outcomes:
        rows += [f"{outcome.parser}: {count} x {fault}" for fault, count in outcome.faults.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
