"""What the choice of an interval takes in and gives out."""

from __future__ import annotations

import dataclasses
from typing import Literal

from raycheck.core.efficiency import check, times

Term = Literal[
    "risk",
    "overhead_bound",
    "feasibility",
    "recovery_point",
    "one_step",
    "fixed",
    "min_interval",
    "max_interval",
]

DAY_S = 86_400.0

# What goes in.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What steps and checkpoints cost now, as measured. All at least 0; infinite is allowed.

    Raises:
        ValueError: If a field is negative or not a number; it is named.
    """

    step_s: float
    """A step while nothing is copied or uploaded, seconds."""

    stall_s: float
    """Training time blocked by one snapshot, the slowest rank's, seconds."""

    persist_s: float
    """From snapshot to durable, the slowest rank's, on average, seconds."""

    slowdown: float = 0.0
    """Training seconds lost to slower steps, per second of persist."""

    restart_s: float = 0.0
    """From a failure to the first new step, seconds."""

    persist_tail_s: float | None = None
    """95th percentile of the persist time, seconds. None: as the average."""

    def __post_init__(self) -> None:
        for name in ("step_s", "stall_s", "persist_s", "slowdown", "restart_s"):
            check(name, getattr(self, name))
        if self.persist_tail_s is not None:
            check("persist_tail_s", self.persist_tail_s)

    @property
    def checkpoint_s(self) -> float:
        """Training time that one checkpoint costs in all, seconds."""
        return self.stall_s + times(self.slowdown, self.persist_s)

    @property
    def slow_persist_s(self) -> float:
        """The persist time to reckon with, seconds."""
        return self.persist_s if self.persist_tail_s is None else self.persist_tail_s

    def scaled(self, bytes_ratio: float) -> Costs:
        """Return the costs expected when each rank writes ``bytes_ratio`` times as many bytes."""
        check("bytes_ratio", bytes_ratio)
        tail_s = self.persist_tail_s
        return dataclasses.replace(
            self,
            stall_s=times(self.stall_s, bytes_ratio),
            persist_s=times(self.persist_s, bytes_ratio),
            persist_tail_s=None if tail_s is None else times(tail_s, bytes_ratio),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How often the job is expected to fail.

    Raises:
        ValueError: If the rate is negative or not a number, or there are no GPUs.
    """

    gpu_days_per_failure: float
    """GPU-days between failures that lose work. Infinite: never."""

    num_gpus: int
    """GPUs of the job now, or its workers when it has no GPUs. At least 1."""

    def __post_init__(self) -> None:
        check("gpu_days_per_failure", self.gpu_days_per_failure)
        if self.num_gpus < 1:
            # Zero would mean a job that never fails, and never checkpoints.
            raise ValueError(f"num_gpus={self.num_gpus!r}: must be at least 1; without GPUs, count workers")

    @property
    def mttf_s(self) -> float:
        """Mean time to failure of the whole job, seconds."""
        return self.gpu_days_per_failure * DAY_S / self.num_gpus


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the user allows. The fields mean what they mean in the settings.

    Raises:
        ValueError: If a limit is negative, zero or not a number; it is named.
    """

    max_overhead: float = 0.035
    recovery_point_s: float | None = None
    min_interval_s: float | None = None
    max_interval_s: float | None = None
    interval_steps: int | None = None
    max_in_flight: int = 1
    on_conflict: Literal["bound", "recovery_point", "error"] = "bound"

    def __post_init__(self) -> None:
        check("max_overhead", self.max_overhead, zero=False)
        for name in ("recovery_point_s", "min_interval_s", "max_interval_s", "interval_steps"):
            value = getattr(self, name)
            if value is not None:
                check(name, value, zero=False)
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight={self.max_in_flight!r}: must be at least 1")
        if self.on_conflict not in ("bound", "recovery_point", "error"):
            raise ValueError(
                f'on_conflict={self.on_conflict!r}: must be "bound", "recovery_point" or "error"'
            )


# What comes out.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """A limit that keeps the interval away from its best value."""

    term: Term
    interval_s: float
    """The shortest or longest interval that it allows, seconds."""

    loss: float
    """Share of wall time that it costs on its own, against the best interval."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An interval, why it was chosen and what it is expected to cost."""

    interval_s: float
    """Training time between snapshots, seconds, what a checkpoint costs not included."""

    interval_steps: int
    """The same in steps, at least 1, rounded to the side that keeps the limits."""

    decided_by: Term
    """The term that gave this interval."""

    overhead: float
    """Predicted cost of checkpoints as a fraction of training time."""

    ettr: float | None
    """Predicted ETTR. None while no failure rate is used."""

    best_interval_s: float | None
    """The interval that would be best without limits. None while no failure rate is used."""

    best_ettr: float | None
    """Predicted ETTR at `best_interval_s`."""

    constraints: tuple[Constraint, ...]
    """The limits that the best interval would break, the most expensive first."""

    reason: str
    """One sentence for people: what changed, and why it is so now."""

    costs: Costs
    failures: Failures | None
    limits: Limits

    @property
    def period_s(self) -> float:
        """Wall time from one snapshot's start to the next one's, seconds."""
        return self.interval_s + self.costs.checkpoint_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossSplit:
    """Where wall time goes that does not end up as progress; fractions of wall time."""

    stall: float
    slowdown: float
    recompute: float
    restart: float

    @property
    def total(self) -> float:
        """All of it: 1 - ETTR."""
        return self.stall + self.slowdown + self.recompute + self.restart
