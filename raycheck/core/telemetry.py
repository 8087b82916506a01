"""What a run's events say, as numbers that can be reckoned with.

Events come from a store, where anything may have become of them: a fact that
is missing, of another type, negative or not finite is None here, and never an
error. Kinds and facts that nothing here knows are left alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from raycheck.core.lineage import GenerationId

_GENERATION = re.compile(r"g([0-9]{6,18})-([0-9a-f]{1,64})")
_MAX_RANKS = 1_000
"""Ranks that one event may name; the writer names the slow ones of a large job."""

_MAX_NUMBER = 1e15
"""No time or size of a run is beyond it; sums of what is below stay finite."""

_MAX_UNIX_S = 1e11


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event, as it was written."""

    unix_s: float
    kind: str
    generation: str
    """As a `GenerationId` is written; empty or anything else where the writer knew of none."""

    writer: str
    """Whose event it is: a coordinator from its start to its end. Measures that add up begin anew with it."""

    facts: Mapping[str, Any]

    def number(self, name: str) -> float | None:
        """Return a fact that is a number from 0 to 1e15."""
        return number(self.facts.get(name))

    def count(self, name: str) -> int | None:
        """Return a fact that is a whole number from 0 to 1e15."""
        value = self.facts.get(name)
        return value if type(value) is int and 0 <= value <= _MAX_NUMBER else None

    def text(self, name: str) -> str | None:
        """Return a fact that is a text and not empty."""
        value = self.facts.get(name)
        return value if isinstance(value, str) and value else None


def events_of(rows: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return events as `observe.events.read_events` gives them, in the order of time.

    Those of no time that a clock shows are left out.
    """
    events = [
        Event(row["unix_s"], row["kind"], row["generation"], row["writer"], row["facts"])
        for row in rows
        if 0 <= row["unix_s"] <= _MAX_UNIX_S
    ]
    return sorted(events, key=lambda event: event.unix_s)


def number(value: object) -> float | None:
    """Return a value as a float if it is a number from 0 to 1e15, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= _MAX_NUMBER else None


def _signed(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _MAX_NUMBER else None


def parse_generation(text: str) -> GenerationId | None:
    """Return the generation that an event names; None if it is no such name."""
    match = _GENERATION.fullmatch(text)
    return GenerationId(int(match[1]), match[2]) if match else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A snapshot that was to become a checkpoint, and what came of it."""

    ended_unix_s: float
    """When it was committed, or given up."""

    generation: str
    step: int
    is_committed: bool
    reason: str
    """Why it was given up: a word and a sentence, as logged. Empty for a checkpoint."""

    stall_s: float
    """Largest of any rank, seconds; 0 if no rank had got so far."""

    persist_s: float
    """Longest of any rank, seconds; 0 if no rank had got so far."""

    num_bytes: int
    """Made durable by it, all ranks together."""

    rank_stalls_s: Mapping[int, float]
    """By rank, of those that the event names; empty if it names none."""

    rank_persists_s: Mapping[int, float]

    @property
    def staged_unix_s(self) -> float:
        """When the last rank's snapshot was complete, to within the time that the commit itself takes."""
        return self.ended_unix_s - self.persist_s

    @property
    def began_unix_s(self) -> float:
        """When training was first stalled for it, to within the same."""
        return self.staged_unix_s - self.stall_s


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """Return all attempts that say which step they were for, in the order of their ends."""
    return [attempt for event in events if (attempt := _attempt(event)) is not None]


def _attempt(event: Event) -> Attempt | None:
    step = event.count("step")
    if event.kind not in ("checkpoint", "attempt_failed") or step is None:
        return None
    is_committed = event.kind == "checkpoint"
    words = [text for text in (event.text("reason"), event.text("detail")) if text]
    return Attempt(
        ended_unix_s=event.unix_s,
        generation=event.generation,
        step=step,
        is_committed=is_committed,
        # A checkpoint's reason is the interval's.
        reason="" if is_committed else ": ".join(words),
        stall_s=event.number("stall_s") or 0.0,
        persist_s=event.number("persist_s") or 0.0,
        num_bytes=event.count("num_bytes") or 0,
        rank_stalls_s=_by_rank(event.facts.get("rank_stalls_s")),
        rank_persists_s=_by_rank(event.facts.get("rank_persists_s")),
    )


def _by_rank(rows: object) -> dict[int, float]:
    """Read pairs of rank and seconds."""
    found = {}
    for row in rows[:_MAX_RANKS] if isinstance(rows, list) else ():
        if isinstance(row, list) and len(row) == 2 and type(row[0]) is int and row[0] >= 0:
            seconds = number(row[1])
            if seconds is not None:
                found[row[0]] = seconds
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the coordinator knew of costs and interval when it wrote an event."""

    unix_s: float
    generation: str
    writer: str
    cost_s: float | None
    """Training time that checkpoints have cost since the writer began, seconds.

    Steps that happened to be faster during uploads make it less than nothing.
    """

    inside_steps_s: float | None
    """Time inside steps since then, seconds."""

    max_overhead: float | None
    interval_s: float | None
    step_s: float | None
    decided_by: str | None
    reason: str | None

    @property
    def overhead(self) -> float | None:
        """The cost as a fraction of the time inside steps; None before there is any."""
        if self.cost_s is None or not self.inside_steps_s:
            return None
        return max(self.cost_s, 0.0) / self.inside_steps_s


def readings_of(events: Iterable[Event]) -> list[Reading]:
    """Return the readings that events carry, in their order."""
    return [
        Reading(
            unix_s=event.unix_s,
            generation=event.generation,
            writer=event.writer,
            cost_s=_signed(event.facts.get("cost_s")),
            inside_steps_s=event.number("inside_steps_s"),
            max_overhead=event.number("max_overhead"),
            interval_s=event.number("interval_s"),
            step_s=event.number("step_s"),
            decided_by=event.text("decided_by"),
            reason=event.text("change") or event.text("reason"),
        )
        for event in events
        if event.kind != "attempt_failed" and "cost_s" in event.facts
    ]
