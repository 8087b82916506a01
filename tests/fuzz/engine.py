"""Runs a target on many inputs and tells what came of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import random
import resource
import signal
import struct
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import targets

BATCH = 200
SLOW_S = 5.0
"""CPU seconds for one input that count as a hang."""

BATCH_LIMIT_S = 60
"""CPU seconds for a batch after which the process is ended by a signal; its input is then on the pad."""

HEADROOM_BYTES = 1 << 30
"""Address space that a target may take beyond what its process has when the inputs begin."""

_KEPT_PER_FAULT = 3

_QUICK_S = 0.01
"""CPU seconds above which an input becomes no seed: it would leave the others no time."""


@dataclasses.dataclass
class Outcome:
    """What came of some inputs of one parser."""

    parser: str
    inputs: int = 0
    seconds: float = 0.0
    """Of processor time, inputs made and parsed."""

    accepted: int = 0
    refused: int = 0
    crashes: int = 0
    hangs: int = 0
    grown_bytes: int = 0
    """How much more memory the process took at its peak than before the inputs."""

    slowest_s: float = 0.0
    faults: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        """Count another process's inputs in."""
        for name in ("inputs", "seconds", "accepted", "refused", "crashes", "hangs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.grown_bytes = max(self.grown_bytes, other.grown_bytes)
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        for fault, count in other.faults.items():
            self.faults[fault] = self.faults.get(fault, 0) + count


class Pad:
    """A file in memory that holds the present input and the counts, readable after its writer has died."""

    _HEAD = struct.Struct("<QQQQ")

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        with open(path, "a+b") as file:
            file.truncate(self._HEAD.size + max_bytes)
            self._map = mmap.mmap(file.fileno(), self._HEAD.size + max_bytes)

    def write(self, data: bytes, outcome: Outcome) -> None:
        """Note what comes next."""
        begin = self._HEAD.size
        self._map[begin : begin + len(data)] = data
        self._HEAD.pack_into(self._map, 0, len(data), outcome.inputs, outcome.accepted, outcome.refused)

    def read(self) -> tuple[bytes, int, int, int]:
        """Return the input last noted, and how many had been run, accepted and refused before it."""
        length, *counts = self._HEAD.unpack_from(self._map, 0)
        return self._map[self._HEAD.size : self._HEAD.size + length], counts[0], counts[1], counts[2]


def fuzz(
    name: str,
    *,
    seed: str,
    num_inputs: int,
    seconds: float = float("inf"),
    folder: Path | None = None,
    pad: Pad | None = None,
    on_batch: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run a target on inputs that ``seed`` decides; faults are saved to ``folder`` and counted.

    What was accepted quickly becomes a seed, so that runs of one ``seed`` may differ after a slow input.

    Ends after ``num_inputs`` or after ``seconds`` of this process's processor time.

    A batch that takes a minute of CPU time ends the process with SIGPROF, and
    address space beyond the headroom is a MemoryError, where ``pad`` is given.
    """
    target = targets.build(name)
    rng = random.Random(f"{name} {seed}")
    outcome = Outcome(name)
    started_s = time.process_time()
    peak_before = _peak_bytes()
    if pad is not None:
        _limit_memory()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    mutator, parse = target.mutator, target.parse
    while outcome.inputs < num_inputs and time.process_time() - started_s < seconds:
        if pad is not None:
            signal.setitimer(signal.ITIMER_PROF, BATCH_LIMIT_S)
        for _ in range(min(BATCH, num_inputs - outcome.inputs)):
            data = mutator(rng)
            if pad is not None:
                pad.write(data, outcome)
            begun_s = time.thread_time()
            is_accepted = False
            try:
                is_accepted = parse(data)
                if is_accepted:
                    outcome.accepted += 1
                else:
                    outcome.refused += 1
            except Exception as error:  # noqa: BLE001  whatever is not documented is what is looked for
                outcome.crashes += 1
                _note(outcome, fault_of(error), data, folder, traceback.format_exc())
            took_s = time.thread_time() - begun_s
            if is_accepted and took_s < _QUICK_S and rng.random() < 0.2:
                mutator.keep(data, rng)
            if took_s > outcome.slowest_s:
                outcome.slowest_s = took_s
                if took_s > SLOW_S:
                    outcome.hangs += 1
                    _note(outcome, f"slow: {took_s:.1f} s", data, folder, "")
            outcome.inputs += 1
        try:
            target.settle()
        except Exception as error:  # noqa: BLE001
            outcome.crashes += 1
            _note(outcome, fault_of(error), data, folder, traceback.format_exc())
        outcome.seconds = time.process_time() - started_s
        outcome.grown_bytes = _peak_bytes() - peak_before
        on_batch(outcome)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return outcome


def fault_of(error: BaseException) -> str:
    """Return a line that is the same for every input with this fault."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if "raycheck" in Path(frame.filename).parts and "tests" not in Path(frame.filename).parts
    ]
    frame = (ours or frames)[-1]
    return f"{type(error).__name__} at {'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"


def save(folder: Path, name: str, kind: str, data: bytes, text: str) -> Path:
    """Keep an input that did harm."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{kind}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    if text:
        path.with_suffix(".txt").write_text(text)
    return path


def _note(outcome: Outcome, fault: str, data: bytes, folder: Path | None, text: str) -> None:
    outcome.faults[fault] = outcome.faults.get(fault, 0) + 1
    if folder is not None and outcome.faults[fault] <= _KEPT_PER_FAULT:
        save(folder, outcome.parser, fault.partition(" ")[0].strip(":"), data, text)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + HEADROOM_BYTES
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def to_json(outcome: Outcome) -> str:
    """Return an outcome as one line."""
    return json.dumps(dataclasses.asdict(outcome))


def from_json(line: str) -> Outcome:
    """Return what `to_json` wrote."""
    return Outcome(**json.loads(line))
