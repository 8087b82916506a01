"""Measurements in, interval out: the shell around the policy in `core.interval`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from raycheck.config import Settings
from raycheck.core.estimate import CostEstimator, OverheadMeter, first_checkpoint_after_s
from raycheck.core.failure_rate import DEFAULT_GPU_DAYS_PER_FAILURE, FailureKind, FailureRate
from raycheck.core.interval import DAY_S, Decision, Failures, Limits, choose_interval
from raycheck.errors import ConfigError

logger = logging.getLogger("raycheck")

_MOST_PERIODS = 10.0

_DECIDE_EVERY_S = 1.0
"""Training time between two looks at the decision; costs a millisecond each."""


class Tuner:
    """Chooses the interval of a run and follows what checkpoints cost. Not thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._limits = Limits(
            max_overhead=settings.max_overhead,
            recovery_point_s=settings.recovery_point_s,
            min_interval_s=settings.min_interval_s,
            max_interval_s=settings.max_interval_s,
            interval_steps=settings.interval_steps,
            max_in_flight=settings.max_in_flight,
            on_conflict=settings.on_conflict,
        )
        self._estimator = CostEstimator(restart_s=settings.restart_s)
        self._meter = OverheadMeter()
        self._given_rate = settings.gpu_days_per_failure
        self._rate = FailureRate(prior_gpu_days_per_failure=given_rate(self._given_rate))
        self._changes: list[str] = []
        self.refusal: str | None = None
        """Why the run must not go on: its limits conflict and ``on_conflict`` is "error"."""

        self._world_size = 1
        self._num_checkpoints = 0
        self._inside_at_last_start_s = 0.0
        self._inside_when_safe_s = 0.0
        self._undecided_s = 0.0
        self._last_step_s: float | None = None
        self.decision: Decision | None = None

    @property
    def failure_rate(self) -> FailureRate:
        """What is believed about the failure rate, for the store to remember."""
        return self._rate

    def remember(self, rate: FailureRate) -> None:
        """Go on from what earlier starts of this run have seen."""
        self._rate = rate.with_prior(self._rate.prior_gpu_days_per_failure)

    def observe_failure(self, kind: FailureKind) -> None:
        """Count a failure that ended a worker group."""
        self._rate = self._rate.after(failures={kind: 1})

    def observe_restart(self, seconds: float) -> None:
        """Take in the time from the last step before a failure to the first one after it."""
        self._estimator.observe_restart(seconds)

    def begin_generation(self, world_size: int) -> None:
        """Start over with the steps of a new worker group; costs are remembered."""
        self._rate = self._rate.with_prior(
            given_rate(self._given_rate, otherwise=self._rate.prior_gpu_days_per_failure)
        )
        if self._estimator.costs() is not None:
            self._estimator.observe_resize(bytes_ratio=self._world_size / world_size)
        self._world_size = world_size
        # What the group before had not saved is lost already.
        self._inside_when_safe_s = self._meter.measured().inside_steps_s
        self._decide()

    def observe_steps(self, records: Iterable[tuple[float, float, bool]]) -> None:
        """Take in step records of rank 0: duration, stall, whether a copy or persist was under way."""
        trained_s = 0.0
        for duration_s, stall_s, is_overlapped in records:
            self._estimator.observe_step(duration_s, overlapped=is_overlapped, stall_s=stall_s)
            self._meter.observe_step(duration_s, overlapped=is_overlapped, stall_s=stall_s)
            trained_s += duration_s
            self._last_step_s = duration_s
        self._undecided_s += trained_s
        if self._undecided_s >= _DECIDE_EVERY_S:
            self._rate = self._rate.after(gpu_days=self._undecided_s * self._world_size / DAY_S)
            self._undecided_s = 0.0
            self._decide()

    def observe_checkpoint(
        self, *, stall_s: float, persist_s: float, bytes_per_rank: int | None = None
    ) -> None:
        """Take in what a committed checkpoint cost."""
        self._num_checkpoints += 1
        self._estimator.observe_checkpoint(
            stall_s=stall_s, persist_s=persist_s, bytes_per_rank=bytes_per_rank
        )
        self._inside_at_last_start_s = self._meter.measured().inside_steps_s - persist_s
        self._inside_when_safe_s = max(self._inside_at_last_start_s, self._inside_when_safe_s)
        self._decide()

    @property
    def step_s(self) -> float | None:
        """Time of a step, seconds; None before the first."""
        costs = self._estimator.costs()
        return costs.step_s if costs is not None else self._last_step_s

    @property
    def persist_tail_s(self) -> float | None:
        """Time from snapshot to durable, 95th percentile, seconds; None before the first checkpoint."""
        costs = self._estimator.costs()
        return costs.persist_tail_s if costs is not None else None

    @property
    def interval_s(self) -> float | None:
        """Time between snapshot starts, seconds; None while no step is known."""
        if self.decision is not None:
            return max(self.decision.period_s, self._paid_for_after_s(self.decision))
        if self._last_step_s is None:
            return None
        ceilings = (self._limits.recovery_point_s, self._limits.max_interval_s)
        return min(
            first_checkpoint_after_s(self._last_step_s), *(c for c in ceilings if c is not None), math.inf
        )

    def _paid_for_after_s(self, decision: Decision) -> float:
        """Return the time from the last snapshot's start until the next one is within the bound.

        The interval keeps the bound as predicted; this keeps it as measured, the
        start included, whose first checkpoints are dearer than the estimates
        know. At most some intervals: a disturbance that looks like our cost
        must not keep a run from checkpointing.
        """
        if self._limits.interval_steps is not None or self._limits.on_conflict == "recovery_point":
            return 0.0
        measured = self._meter.measured()
        cost_s = measured.stall_s + measured.slowdown_s + decision.costs.checkpoint_s
        needed_s = cost_s / self._limits.max_overhead - self._inside_at_last_start_s
        return min(needed_s, _MOST_PERIODS * decision.period_s)

    @property
    def overhead(self) -> float:
        """What checkpoints have cost so far, as a fraction of the time inside steps."""
        return self._meter.measured().fraction

    @property
    def at_risk_s(self) -> float:
        """Time inside steps since the last committed snapshot, or since the restore, seconds."""
        return max(self._meter.measured().inside_steps_s - self._inside_when_safe_s, 0.0)

    def interval_text(self) -> str:
        """Return the interval for a log line."""
        if self.decision is None:
            return "not chosen yet"
        return f"{self.decision.interval_s:.1f} s ({self.decision.decided_by})"

    def status(self) -> dict[str, Any]:
        """Return what is known, as plain values."""
        decision = self.decision
        measured = self._meter.measured()
        return {
            "cost_s": measured.stall_s + measured.slowdown_s,
            "inside_steps_s": measured.inside_steps_s,
            "num_checkpoints": self._num_checkpoints,
            "overhead": self.overhead,
            "max_overhead": self._limits.max_overhead,
            "step_s": self.step_s,
            "bytes_per_rank": self._estimator.bytes_per_rank,
            "interval_s": decision.interval_s if decision else None,
            "decided_by": decision.decided_by if decision else None,
            "reason": decision.reason if decision else None,
            "mttf_s": decision.failures.mttf_s if decision and decision.failures else None,
        }

    def _decide(self) -> None:
        costs = self._estimator.costs()
        if costs is None:
            return
        failures = Failures(
            gpu_days_per_failure=self._rate.gpu_days_per_failure, num_gpus=max(self._world_size, 1)
        )
        before = self.decision
        try:
            self.decision = choose_interval(costs, failures, self._limits, previous=before)
        except ConfigError as error:
            self.refusal = str(error)
            return
        if before is None or _is_news(before, self.decision):
            self._changes.append(self.decision.reason)
            logger.info("%s", self.decision.reason)

    def take_changes(self) -> list[str]:
        """Return one sentence for each change of the interval since the last call."""
        changes, self._changes = self._changes, []
        return changes


def _is_news(before: Decision, now: Decision) -> bool:
    """Whether people want to hear of it: another term decides, or the interval is another by a tenth."""
    if now.decided_by != before.decided_by:
        return True
    return not 0.9 < now.interval_s / max(before.interval_s, 1e-9) < 1.1


def given_rate(
    given: float | str | Callable[[], float], otherwise: float = DEFAULT_GPU_DAYS_PER_FAILURE
) -> float:
    """Return the GPU-days per failure that the user gave, as a number, a file or a function.

    Args:
        given: As in the settings.
        otherwise: For a file or function that does not answer with a number
            above 0; that is worth a warning and no more.
    """
    try:
        value = float(
            Path(given).read_text() if isinstance(given, str) else given() if callable(given) else given
        )
    except Exception as error:  # noqa: BLE001  it is the user's own function
        logger.warning("gpu_days_per_failure=%r cannot be asked, %g is used: %s", given, otherwise, error)
        return otherwise
    if not (0 < value < math.inf):
        logger.warning(
            "gpu_days_per_failure=%r says %r, which is no rate; %g is used", given, value, otherwise
        )
        return otherwise
    return value
