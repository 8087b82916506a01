"""The control page: the few words that a worker and its agent share in memory.

It is the first page of a worker's segment; the arena follows. Each word is
eight aligned bytes with one writer, so a read never sees half of one. The
worker reads its plan here at every step boundary and leaves its progress
here; neither costs a system call. What must not be missed, or must be seen
after the arena's bytes, goes over the socket instead, whose system calls
order it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

PAGE_BYTES = 4096
"""Size of the control page, and offset of the arena in the segment."""

NUM_RECORDS = 120
"""Step records kept in the ring: the newest ones, older are overwritten."""

_STEP_BITS = 40
_STEP_MASK = (1 << _STEP_BITS) - 1
_PLAN_IDS = 1 << (64 - _STEP_BITS)

_PLAN, _IN_FLIGHT, _STEP, _NUM_STEPS_RECORDED, _HALT, _HOLD, _SPARED_PLAN = range(7)
_RING = 64
_RECORD_WORDS = 3
_SPARED = _RING + NUM_RECORDS * _RECORD_WORDS
_NUM_WORDS = PAGE_BYTES // 8

MAX_SPARED_RANKS = (_NUM_WORDS - _SPARED) * 64
"""Ranks from this one on cannot be spared: there is a bit for each of those before."""


class Plan(NamedTuple):
    """The next checkpoint: ``id`` counts the plans of a generation from 1, ``step`` is the boundary."""

    id: int
    step: int


class StepRecord(NamedTuple):
    """One step as its worker measured it.

    ``number`` counts records from 0. ``is_overlapped``: a copy or a persist was
    under way at its start or end, so it does not tell the free step time.
    """

    number: int
    duration_s: float
    stall_s: float
    is_overlapped: bool


class ControlPage:
    """A view of a control page over shared memory.

    Args:
        memory: Writable, ``PAGE_BYTES`` long; kept referenced while in use.
    """

    def __init__(self, memory: memoryview) -> None:
        if memory.nbytes != PAGE_BYTES:
            raise ValueError(f"a control page has {PAGE_BYTES} bytes, not {memory.nbytes}")
        self._words = memory.cast("B").cast("Q")

    def release(self) -> None:
        """Give up the view, so that the memory below it can be unmapped."""
        self._words.release()

    # Written by the agent.

    @property
    def plan(self) -> Plan:
        """The published plan; id 0 means none yet."""
        word = self._words[_PLAN]
        return Plan(word >> _STEP_BITS, word & _STEP_MASK)

    @plan.setter
    def plan(self, plan: Plan) -> None:
        if not 0 <= plan.id < _PLAN_IDS or not 0 <= plan.step <= _STEP_MASK:
            raise ValueError(f"{plan} does not fit a word")
        # One store: id and step always belong together.
        self._words[_PLAN] = plan.id << _STEP_BITS | plan.step

    @property
    def is_in_flight(self) -> bool:
        """Whether an attempt of this job is between its snapshot and its end."""
        return bool(self._words[_IN_FLIGHT])

    @is_in_flight.setter
    def is_in_flight(self, value: bool) -> None:
        self._words[_IN_FLIGHT] = int(value)

    @property
    def must_halt(self) -> bool:
        """Whether the worker must stop: the reason came over the socket."""
        return bool(self._words[_HALT])

    @must_halt.setter
    def must_halt(self, value: bool) -> None:
        self._words[_HALT] = int(value)

    @property
    def hold_step(self) -> int:
        """The step after which to take no other, since the worker is about to be stopped; 0: none.

        Written before the plan of that step: who sees the plan in time sees this too.
        """
        return self._words[_HOLD]

    @hold_step.setter
    def hold_step(self, step: int) -> None:
        self._words[_HOLD] = step

    def spare(self, plan_id: int, ranks: Collection[int]) -> None:
        """Say which ranks take no share in a plan of what all ranks hold alike; before the plan is shown."""
        if not ranks:
            # A coordinator that has restarted may give one id again.
            if self._words[_SPARED_PLAN] == plan_id:
                self._words[_SPARED_PLAN] = 0
            return
        # Whoever reads them for the plan before sees that this one has come.
        self._words[_SPARED_PLAN] = plan_id
        for at in range(_SPARED, _NUM_WORDS):
            first = (at - _SPARED) * 64
            self._words[at] = sum(1 << rank - first for rank in ranks if first <= rank < first + 64)

    def spared(self, plan_id: int) -> frozenset[int]:
        """Return the ranks that are spared in a plan. It holds if `plan` still is that plan afterwards."""
        if self._words[_SPARED_PLAN] != plan_id:
            return frozenset()
        return frozenset(
            (at - _SPARED) * 64 + bit
            for at in range(_SPARED, _NUM_WORDS)
            if (word := self._words[at])
            for bit in range(64)
            if word >> bit & 1
        )

    # Written by the worker.

    @property
    def step(self) -> int:
        """Steps completed."""
        return self._words[_STEP]

    @step.setter
    def step(self, step: int) -> None:
        self._words[_STEP] = step

    def record_step(self, duration_s: float, stall_s: float, *, is_overlapped: bool) -> None:
        """Append a step record; constant time."""
        index = self._words[_NUM_STEPS_RECORDED]
        at = _RING + index % NUM_RECORDS * _RECORD_WORDS
        self._words[at] = int(duration_s * 1e9)
        self._words[at + 1] = int(stall_s * 1e9)
        self._words[at + 2] = int(is_overlapped)
        # Last, so that a reader who sees the count sees the record.
        self._words[_NUM_STEPS_RECORDED] = index + 1

    def records_since(self, index: int) -> list[StepRecord]:
        """Return the records from ``index`` on that are still in the ring, oldest first."""
        end = self._words[_NUM_STEPS_RECORDED]
        # The oldest slot may be written while we read it: leave one out.
        first = max(index, end - NUM_RECORDS + 1, 0)
        return [self._record(i) for i in range(first, end)]

    def _record(self, index: int) -> StepRecord:
        at = _RING + index % NUM_RECORDS * _RECORD_WORDS
        duration_ns, stall_ns, overlapped = self._words[at : at + _RECORD_WORDS]
        return StepRecord(index, duration_ns / 1e9, stall_ns / 1e9, bool(overlapped))
