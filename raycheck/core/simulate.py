"""Monte Carlo of a training job that fails: what a checkpoint policy achieves.

A job trains; at the policy's interval it stalls for a snapshot and persists it
beside slower training; one persist at a time. A failure loses all training
since the snapshot of the newest durable checkpoint and costs a restart, in
which the job may fail again. A resize saves first and restarts.

Everything is drawn from the seed: failures from one stream and persist times
from another, so that policies compared at one seed meet the same fate.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from raycheck.core.efficiency import best_interval_s, check
from raycheck.core.estimate import first_checkpoint_after_s
from raycheck.core.failure_rate import DEFAULT_GPU_DAYS_PER_FAILURE, FailureRate
from raycheck.core.interval import (
    DAY_S,
    Costs,
    Decision,
    Failures,
    Limits,
    choose_interval,
    feasible_interval_s,
)

# When the job fails.


class FailureModel(Protocol):
    """Draws the times between failures."""

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Yield gaps in units of the mean time to failure, so that they scale with the job."""
        ...


@dataclasses.dataclass(frozen=True)
class Exponential:
    """Failures without memory."""

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Yield exponential gaps of mean 1."""
        while True:
            yield rng.expovariate(1.0)


@dataclasses.dataclass(frozen=True)
class Weibull:
    """Failures that come in bursts when ``shape`` is below 1, as measured on many clusters."""

    shape: float = 0.7

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Yield Weibull gaps of mean 1."""
        scale = 1.0 / math.gamma(1.0 + 1.0 / self.shape)
        while True:
            yield rng.weibullvariate(scale, self.shape)


@dataclasses.dataclass(frozen=True)
class Bathtub:
    """Preemptible machines: reclaimed early or near a hard limit, seldom between.

    The lifetimes that Kadupitiya et al. (2020) fitted to preemptible machines
    with a limit of 24 hours, ``F(t) = A (1 - exp(-t / tau1) + exp((t - b) / tau2))``,
    scaled to a mean of 1.
    """

    early_share: float = 0.45
    early_h: float = 1.0
    late_h: float = 0.8
    limit_h: float = 24.0

    def gaps(self, rng: random.Random) -> Iterator[float]:
        """Yield gaps of mean 1."""
        lifetimes_h = [self._quantile_h((i + 0.5) / 1000) for i in range(1000)]
        mean_h = statistics.fmean(lifetimes_h)
        while True:
            yield lifetimes_h[rng.randrange(1000)] / mean_h

    def _quantile_h(self, share: float) -> float:
        low_h, high_h = 0.0, self.limit_h
        for _ in range(50):
            middle_h = (low_h + high_h) / 2
            if self._share_by(middle_h) / self._share_by(self.limit_h) < share:
                low_h = middle_h
            else:
                high_h = middle_h
        return high_h

    def _share_by(self, hours: float) -> float:
        late = math.exp((hours - self.limit_h) / self.late_h) - math.exp(-self.limit_h / self.late_h)
        return self.early_share * (1 - math.exp(-hours / self.early_h) + late)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Failures at recorded times in seconds since the start, whatever the size of the job; then none."""

    times_s: tuple[float, ...]


# What is simulated.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job and its fate. Times in seconds."""

    costs: Costs
    """The true costs."""

    num_gpus: int
    gpu_days_per_failure: float
    """The true rate."""

    duration_s: float
    failures: FailureModel | Recorded = Exponential()
    resizes: tuple[tuple[float, int], ...] = ()
    """(time, GPUs from then on), in order of time."""

    persist_spread: float = 0.0
    """Standard deviation of the logarithm of persist times; their mean stays ``costs.persist_s``."""

    def __post_init__(self) -> None:
        Failures(gpu_days_per_failure=self.gpu_days_per_failure, num_gpus=self.num_gpus)
        check("duration_s", self.duration_s, zero=False)
        check("persist_spread", self.persist_spread)
        if math.isinf(self.duration_s) or math.isinf(self.costs.checkpoint_s):
            raise ValueError(f"duration_s={self.duration_s!r} and costs must be finite")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a policy may know when it is asked."""

    costs: Costs
    """As measured so far; before the first checkpoint as they truly are."""

    has_measured: bool
    num_gpus: int
    gpu_days: float
    num_failures: int


class Policy(Protocol):
    """Decides when to checkpoint. One instance serves one simulated run."""

    def interval_s(self, view: View) -> float:
        """Return the training time until the next snapshot; at each start and each snapshot."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one run came to. Times in seconds."""

    duration_s: float
    trained_s: float
    """Training that was not lost."""

    recomputed_s: float
    restarting_s: float
    overhead_s: float
    """Stalls and slower steps."""

    num_failures: int
    num_checkpoints: int

    @property
    def ettr(self) -> float:
        """Share of wall time that became progress."""
        return self.trained_s / self.duration_s

    @property
    def overhead(self) -> float:
        """Cost of checkpoints as a fraction of the training it was spent on."""
        trained_s = self.trained_s + self.recomputed_s
        return self.overhead_s / trained_s if trained_s > 0 else 0.0


def simulate(job: Job, policy: Policy, *, seed: int) -> Outcome:
    """Return what ``policy`` makes of one run of ``job``. The same seed gives the same fate."""
    return _Run(job, policy, seed).outcome()


def compare(
    job: Job, policies: dict[str, Callable[[], Policy]], *, num_runs: int, seed: int = 0
) -> dict[str, list[Outcome]]:
    """Return ``num_runs`` outcomes of each policy; the n-th of each met the same fate."""
    return {
        name: [simulate(job, make(), seed=seed + i) for i in range(num_runs)]
        for name, make in policies.items()
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


class _Fate:
    """When the job fails and is resized, in wall time."""

    def __init__(self, job: Job, seed: int) -> None:
        rng = random.Random(f"{seed}/failures")
        self._rate = job.gpu_days_per_failure
        self._recorded: Iterator[float] | None = None
        self._gaps: Iterator[float] = iter(())
        if isinstance(job.failures, Recorded):
            self._recorded = iter(sorted(job.failures.times_s))
        else:
            self._gaps = job.failures.gaps(rng)
        self._resizes = list(job.resizes)
        self._num_gpus = job.num_gpus
        self._left = 0.0
        self.failure_s = math.inf
        self.draw(0.0)

    @property
    def num_gpus(self) -> int:
        return self._num_gpus

    @property
    def resize_s(self) -> float:
        return self._resizes[0][0] if self._resizes else math.inf

    def draw(self, now_s: float) -> None:
        """Find the next failure after one at ``now_s``."""
        if self._recorded is not None:
            self.failure_s = next((t for t in self._recorded if t > now_s), math.inf)
        else:
            self.failure_s = now_s + next(self._gaps, math.inf) * self._mttf_s()

    def resize(self) -> None:
        """Go to the next size; what was left of the gap shrinks or grows with it."""
        at_s, num_gpus = self._resizes.pop(0)
        left = (self.failure_s - at_s) / self._mttf_s()
        self._num_gpus = num_gpus
        if self._recorded is None:
            self.failure_s = at_s + left * self._mttf_s()

    def _mttf_s(self) -> float:
        return self._rate * DAY_S / self._num_gpus


class _Run:
    """One simulated run: cycles of training from one snapshot to the next."""

    def __init__(self, job: Job, policy: Policy, seed: int) -> None:
        self._job, self._policy = job, policy
        self._fate = _Fate(job, seed)
        self._persists = random.Random(f"{seed}/persists")
        self._measured = _Measured(job.costs)
        self._now_s = self._gpu_s = 0.0
        self._work_s = self._durable_s = 0.0
        self._recomputed_s = self._restarting_s = self._overhead_s = 0.0
        self._num_failures = self._num_checkpoints = 0

    def outcome(self) -> Outcome:
        persist_s: float | None = None
        while self._now_s < self._job.duration_s:
            persist_s = self._cycle(persist_s)
        return Outcome(
            duration_s=self._now_s,
            trained_s=self._work_s,
            recomputed_s=self._recomputed_s,
            restarting_s=self._restarting_s,
            overhead_s=self._overhead_s,
            num_failures=self._num_failures,
            num_checkpoints=self._num_checkpoints,
        )

    def _cycle(self, persist_s: float | None) -> float | None:
        """Train until the next snapshot, or until something ends it.

        Args:
            persist_s: The persist that runs beside it, if a snapshot has just been started.

        Returns:
            The persist time of the snapshot due now, or None after a restart.
        """
        costs, work_s = self._job.costs, self._work_s
        stall_s = costs.stall_s if persist_s is not None else 0.0
        beside_s = persist_s or 0.0
        speed = max(1 - costs.slowdown, 0.0)
        # The next snapshot waits for the persist of this one.
        alone_s = max(self._policy.interval_s(self._view()) - speed * beside_s, 0.0)
        cycle_s = stall_s + beside_s + alone_s
        if cycle_s <= 0:
            raise ValueError("the policy checkpoints without end: its interval is 0 and so is the cost")
        end_s = min(self._fate.failure_s, self._fate.resize_s, self._job.duration_s)
        is_whole = self._now_s + cycle_s < end_s
        elapsed_s = cycle_s if is_whole else end_s - self._now_s
        slow_s = min(max(elapsed_s - stall_s, 0.0), beside_s)
        free_s = max(elapsed_s - stall_s - beside_s, 0.0)
        self._work_s += speed * slow_s + free_s
        self._overhead_s += min(elapsed_s, stall_s) + (1 - speed) * slow_s
        self._advance(elapsed_s)
        if persist_s is not None and elapsed_s >= stall_s + beside_s:
            self._durable_s = work_s
            self._num_checkpoints += 1
            self._measured.add(persist_s)
        if is_whole:
            return self._draw_persist_s()
        self._end_at(end_s)
        return None

    def _end_at(self, end_s: float) -> None:
        if end_s == self._job.duration_s:
            self._now_s = end_s
            return
        if end_s == self._fate.failure_s:
            self._fail()
        else:
            self._fate.resize()
            self._durable_s = self._work_s
        left_s = self._job.costs.restart_s
        while left_s > 0 and self._now_s < self._job.duration_s:
            spent_s = min(left_s, max(self._fate.failure_s - self._now_s, 0.0))
            spent_s = min(spent_s, self._job.duration_s - self._now_s)
            self._advance(spent_s)
            self._restarting_s += spent_s
            left_s -= spent_s
            if self._now_s >= self._fate.failure_s:
                self._fail()
                left_s = self._job.costs.restart_s
            while self._fate.resize_s <= self._now_s:
                self._fate.resize()

    def _fail(self) -> None:
        self._num_failures += 1
        self._recomputed_s += self._work_s - self._durable_s
        self._work_s = self._durable_s
        self._fate.draw(self._now_s)

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds
        self._gpu_s += seconds * self._fate.num_gpus

    def _draw_persist_s(self) -> float:
        costs, spread = self._job.costs, self._job.persist_spread
        if spread == 0:
            return costs.persist_s
        return costs.persist_s * math.exp(self._persists.gauss(-spread * spread / 2, spread))

    def _view(self) -> View:
        return View(
            costs=self._measured.costs,
            has_measured=self._num_checkpoints > 0,
            num_gpus=self._fate.num_gpus,
            gpu_days=self._gpu_s / DAY_S,
            num_failures=self._num_failures,
        )


class _Measured:
    """The costs as a policy comes to know them."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._persists_s: list[float] = []

    def add(self, persist_s: float) -> None:
        if persist_s == self.costs.persist_s and not self._persists_s:
            return
        self._persists_s = [*self._persists_s[-31:], persist_s]
        ordered = sorted(self._persists_s)
        self.costs = dataclasses.replace(
            self.costs,
            persist_s=statistics.fmean(ordered),
            persist_tail_s=ordered[math.ceil(0.95 * len(ordered)) - 1],
        )


# Policies.


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Every so many seconds of training."""

    every_s: float

    def interval_s(self, view: View) -> float:
        """Return the fixed interval."""
        return self.every_s


@dataclasses.dataclass(frozen=True)
class CheckFreq:
    """As often as the bound allows and uploads can follow (Mohan et al., FAST 2021)."""

    max_overhead: float = 0.035

    def interval_s(self, view: View) -> float:
        """Return the longer of both."""
        return max(view.costs.checkpoint_s / self.max_overhead, feasible_interval_s(view.costs))


@dataclasses.dataclass(frozen=True)
class YoungDaly:
    """The best interval for a rate that is given and believed, without an overhead bound."""

    gpu_days_per_failure: float

    def interval_s(self, view: View) -> float:
        """Return the best interval at the present size."""
        failures = Failures(gpu_days_per_failure=self.gpu_days_per_failure, num_gpus=view.num_gpus)
        return best_interval_s(view.costs.checkpoint_s, failures.mttf_s)


@dataclasses.dataclass(frozen=True)
class Continuous:
    """A new snapshot whenever none is in flight."""

    def interval_s(self, view: View) -> float:
        """Return one step: the persist makes it longer."""
        return view.costs.step_s


class Tuned:
    """Raycheck's choice, with the failure rate learnt from the run itself.

    Args:
        limits: The user's limits.
        prior_gpu_days_per_failure: What is believed before the run.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        prior_gpu_days_per_failure: float = DEFAULT_GPU_DAYS_PER_FAILURE,
    ) -> None:
        self._limits = limits
        self._rate = FailureRate(prior_gpu_days_per_failure=prior_gpu_days_per_failure)
        self._decision: Decision | None = None
        self._asked: tuple[Costs, int, int] | None = None

    def interval_s(self, view: View) -> float:
        """Return raycheck's decision, taken anew when something has moved."""
        if not view.has_measured:
            return first_checkpoint_after_s(view.costs.step_s)
        asked = (view.costs, view.num_gpus, view.num_failures)
        # A twentieth more experience moves the interval by less than the hysteresis.
        has_more_days = view.gpu_days > 1.05 * self._rate.gpu_days
        if self._decision is None or asked != self._asked or has_more_days:
            self._decide(view)
            self._asked = asked
        assert self._decision is not None, "a decision was just made"
        return self._decision.interval_s

    def _decide(self, view: View) -> None:
        self._rate = dataclasses.replace(
            self._rate, gpu_days=view.gpu_days, failures={"worker": view.num_failures}
        )
        failures = Failures(gpu_days_per_failure=self._rate.gpu_days_per_failure, num_gpus=view.num_gpus)
        self._decision = choose_interval(view.costs, failures, self._limits, previous=self._decision)
