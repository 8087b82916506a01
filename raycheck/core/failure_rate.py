"""How many GPU-days pass between failures: a prior, and what this run has seen.

The posterior is kept on a grid, log-uniform from 0.1 to 100,000 GPU-days per
failure, with prior weight ``exp(-|ln(x / centre)| / 2)``. Published fleets
range from 315 to 3,748 GPU-days and spot machines are near 0.5, so a prior must
let go of its centre at once: a Gamma prior worth one failure is still far off
after a hundred. With n failures in E GPU-days the likelihood of x is that of a
Poisson process, ``x**-n · exp(-E / x)``, and (n, E) is all that is remembered.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from raycheck.core.efficiency import check

FailureKind = Literal["worker", "node", "exception", "preempted"]
"""``preempted``: announced early enough that the state was saved before the end."""

# An exception of the training function counts: CUDA and network errors arrive as
# such. A preemption that left time to save loses no work, however often it comes.
COUNTED: frozenset[FailureKind] = frozenset({"worker", "node", "exception"})

DEFAULT_GPU_DAYS_PER_FAILURE = 3748.0

_GRID_LOW, _GRID_HIGH = 0.1, 100_000.0
_POINTS_PER_DECADE = 40

_SEEN_LIMITS = {"prior_gpu_days_per_failure": (1e-9, 1e15), "gpu_days": (0.0, 1e12)}
_MAX_FAILURES = 10**9
"""What a run can have seen at most: beyond it, the grid's powers would be no numbers any more."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FailureRate:
    """What is believed about the failure rate. Immutable; `after` returns the next belief.

    Raises:
        ValueError: If a number is negative or not finite, or a kind is unknown.
    """

    prior_gpu_days_per_failure: float = DEFAULT_GPU_DAYS_PER_FAILURE
    """Centre of the prior. Above 0."""

    gpu_days: float = 0.0
    """GPU-days of this run so far, all its generations together."""

    failures: Mapping[FailureKind, int] = dataclasses.field(default_factory=dict)
    """Failures of this run so far, by kind; those of kinds that lose no work are only told."""

    def __post_init__(self) -> None:
        check("prior_gpu_days_per_failure", self.prior_gpu_days_per_failure, zero=False)
        check("gpu_days", self.gpu_days)
        for name in ("prior_gpu_days_per_failure", "gpu_days"):
            if math.isinf(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be finite")
        for kind, count in self.failures.items():
            if kind not in get_args(FailureKind):
                raise ValueError(f"failures has {kind!r}: kinds are {', '.join(get_args(FailureKind))}")
            check(f"failures[{kind!r}]", count)

    @property
    def num_failures(self) -> int:
        """Failures that cost work."""
        return sum(count for kind, count in self.failures.items() if kind in COUNTED)

    def after(
        self, *, gpu_days: float = 0.0, failures: Mapping[FailureKind, int] | None = None
    ) -> FailureRate:
        """Return the belief after this many more GPU-days and failures."""
        check("gpu_days", gpu_days)
        counts = dict(self.failures)
        for kind, count in (failures or {}).items():
            counts[kind] = counts.get(kind, 0) + count
        return dataclasses.replace(self, gpu_days=self.gpu_days + gpu_days, failures=counts)

    def with_prior(self, gpu_days_per_failure: float) -> FailureRate:
        """Return the same evidence under another prior, such as a rate that a fleet has measured anew."""
        return dataclasses.replace(self, prior_gpu_days_per_failure=gpu_days_per_failure)

    def mean_per_gpu_day(self) -> float:
        """Return the expected failures per GPU-day.

        The mean of the rate and not of its inverse: to first order the loss at
        an interval is linear in the rate, so this is the one that minimises the
        expected loss. It fears the worst at first and relaxes within days.
        """
        return sum(weight / x for x, weight in self._posterior())

    def upper_per_gpu_day(self, credibility: float = 0.95) -> float:
        """Return the rate that the true one is below with this probability.

        Raises:
            ValueError: If ``credibility`` is not between 0 and 1.
        """
        if not 0 < credibility < 1:
            raise ValueError(f"credibility={credibility!r}: must be between 0 and 1")
        # From many GPU-days per failure to few: rising rates.
        falling = list(reversed(self._posterior()))
        below = itertools.accumulate(weight for _, weight in falling)
        return next(
            (1 / x for (x, _), sum_ in zip(falling, below, strict=True) if sum_ >= credibility),
            1 / falling[-1][0],
        )

    @property
    def gpu_days_per_failure(self) -> float:
        """GPU-days per failure to reckon with."""
        return 1.0 / self.mean_per_gpu_day()

    def to_dict(self) -> dict[str, Any]:
        """Return the belief as plain JSON values."""
        return {
            "prior_gpu_days_per_failure": self.prior_gpu_days_per_failure,
            "gpu_days": self.gpu_days,
            "failures": dict(sorted(self.failures.items())),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> FailureRate:
        """Return the belief that `to_dict` wrote.

        Raises:
            ValueError: If a field is missing or wrong.
        """
        try:
            seen = {name: float(fields[name]) for name in _SEEN_LIMITS}
            failures = {kind: int(count) for kind, count in fields["failures"].items()}
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a failure rate: {str(fields)[:300]}") from error
        for name, (low, high) in _SEEN_LIMITS.items():
            if not low <= seen[name] <= high:
                raise ValueError(f"not a failure rate: {name}={seen[name]!r}")
        if any(count > _MAX_FAILURES for count in failures.values()):
            raise ValueError("not a failure rate: more failures than a run can have seen")
        return cls(failures=failures, **seen)

    def _posterior(self) -> list[tuple[float, float]]:
        """Grid points with their probabilities, rising in GPU-days per failure."""
        centre, num_failures = self.prior_gpu_days_per_failure, self.num_failures
        grid = list(_grid(centre))
        logs = [-abs(math.log(x / centre)) / 2 - num_failures * math.log(x) - self.gpu_days / x for x in grid]
        highest = max(logs)
        weights = [math.exp(log - highest) for log in logs]
        total = sum(weights)
        return [(x, weight / total) for x, weight in zip(grid, weights, strict=True)]


def _grid(centre: float) -> Iterator[float]:
    """Points that are evenly spaced in the logarithm, a decade around an extreme centre included."""
    low, high = min(_GRID_LOW, centre / 10), max(_GRID_HIGH, centre * 10)
    num_points = round(math.log10(high / low) * _POINTS_PER_DECADE) + 1
    ratio = math.log(high / low) / (num_points - 1)
    return (low * math.exp(i * ratio) for i in range(num_points))
