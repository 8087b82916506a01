"""What a report says of a run's time: phases, losses, and what each generation did."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from raycheck.core.lineage import GenerationId
from raycheck.core.telemetry import Attempt

Phase = Literal["start", "training", "again", "down", "stopped"]
Ending = Literal["failure", "resize", "restart", "finished", "stopped", "open"]
"""How a generation ended: "restart" if another followed and nobody says why, "open" if none did."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the records say of a generation."""

    generation: GenerationId
    claimed_unix_s: float | None = None
    world_size: int | None = None
    has_record: bool = False
    """Whether it had restored, and could commit."""

    parent: tuple[int, GenerationId] | None = None
    """The checkpoint that it restored: step, and who wrote it. None: it started at step 0."""

    failures: Mapping[str, int] | None = None
    """Failures of the run before it, by kind; None if that is not known."""

    has_ended: bool = False
    """Whether its training function came to its end."""


class Span(NamedTuple):
    """A phase on the axis of time."""

    begin_unix_s: float
    end_unix_s: float
    phase: Phase

    @property
    def length_s(self) -> float:
        """Its length, seconds."""
        return self.end_unix_s - self.begin_unix_s


@dataclasses.dataclass(frozen=True, slots=True)
class Losses:
    """Seconds of wall time, by what became of them. All at least 0."""

    productive_s: float = 0.0
    """Steps that count, without what checkpoints cost."""

    stall_s: float = 0.0
    """Training blocked by snapshots, the slowest rank's each time."""

    slowdown_s: float = 0.0
    """Steps that were slower while snapshots were copied and uploaded."""

    recompute_s: float = 0.0
    """Steps that were taken again, or left behind."""

    restart_s: float = 0.0
    """From the last sign of life of a generation until the next one trained."""

    start_s: float = 0.0
    """Starts that nothing had to be made up for by: a job's first."""

    @property
    def wall_s(self) -> float:
        """All of it."""
        return math.fsum(dataclasses.astuple(self))

    @property
    def ettr(self) -> float | None:
        """Productive time over wall time; None if there was none."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else None

    def __add__(self, other: Losses) -> Losses:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Losses(*(a + b for a, b in zip(mine, theirs, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAccount:
    """One generation: when, what it did, what it cost."""

    start: Start
    spans: tuple[Span, ...]
    """Without those of no length."""

    restored_step: int
    reached_step: int
    """The furthest step that anything tells of."""

    is_reached_exact: bool
    """Whether that is the furthest it got; else it may have been further."""

    left_at_step: int | None
    """The last step that counts; None if it is not in the lineage."""

    ending: Ending
    failure_kinds: tuple[str, ...]
    """What ended it, if the next start knew."""

    attempts: tuple[Attempt, ...]
    losses: Losses

    @property
    def steps_lost(self) -> int:
        """Steps that do not count, of those that are known."""
        kept = self.restored_step if self.left_at_step is None else max(self.left_at_step, self.restored_step)
        return max(self.reached_step - kept, 0)

    @property
    def num_checkpoints(self) -> int:
        """Attempts that were committed."""
        return sum(attempt.is_committed for attempt in self.attempts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """A run's generations in the order of time."""

    generations: tuple[GenerationAccount, ...]
    losses: Losses
    overhead: float | None
    """What checkpoints cost as a fraction of the time inside steps, as measured; None if nothing tells."""

    max_overhead: float | None
    """The newest bound."""

    @property
    def begin_unix_s(self) -> float:
        """Where the axis of time begins; 0 without generations."""
        return min((g.spans[0].begin_unix_s for g in self.generations if g.spans), default=0.0)

    @property
    def end_unix_s(self) -> float:
        """Where it ends."""
        return max((g.spans[-1].end_unix_s for g in self.generations if g.spans), default=0.0)

    @property
    def reached_step(self) -> int:
        """The furthest step that counts."""
        return max((g.reached_step for g in self.generations if g.left_at_step is not None), default=0)

    @property
    def num_failures(self) -> int:
        """Generations that a failure ended."""
        return sum(g.ending == "failure" for g in self.generations)
