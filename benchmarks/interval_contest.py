"""A contest of checkpoint policies over simulated failures: who keeps most of the time?

    python benchmarks/interval_contest.py            # the tables of docs/interval.md, about four minutes
    python benchmarks/interval_contest.py --quick    # a look, under half a minute

All policies at one seed meet the same failures and the same persist times. The
others are told the true failure rate and the true costs; raycheck begins with
its prior and learns both. "best fixed" is an oracle: for each row the interval,
out of a grid that holds the bound, that did best on these very failures. An
asterisk marks a policy that does not keep the overhead bound of 3.5 % where no
failure cuts its intervals short: it runs out of contest. Errors are standard errors; that of
the gap is of the paired differences.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from raycheck.core.failure_rate import DEFAULT_GPU_DAYS_PER_FAILURE
from raycheck.core.interval import (
    DAY_S,
    Costs,
    Failures,
    Limits,
    best_interval_s,
    feasible_interval_s,
)
from raycheck.core.simulate import (
    Bathtub,
    CheckFreq,
    Continuous,
    Exponential,
    Fixed,
    Job,
    Outcome,
    Policy,
    Tuned,
    View,
    Weibull,
    YoungDaly,
    mean_and_error,
    simulate,
)

MAX_OVERHEAD = 0.035
SIZES = (8, 64, 1_024, 4_096, 16_384, 100_000)
COSTS = {
    "cheap": Costs(step_s=1.0, stall_s=0.2, persist_s=20.0, slowdown=0.01, restart_s=60.0),
    "middle": Costs(step_s=1.0, stall_s=2.0, persist_s=120.0, slowdown=0.03, restart_s=600.0),
    "dear": Costs(step_s=5.0, stall_s=10.0, persist_s=600.0, slowdown=0.1, restart_s=600.0),
    "blocking": Costs(step_s=1.0, stall_s=60.0, persist_s=0.0, slowdown=0.0, restart_s=600.0),
}
NAMES = ("fixed 30 min", "fixed 4 h", "best fixed", "CheckFreq", "Young/Daly", "continuous", "raycheck")
OURS = "raycheck"


@dataclasses.dataclass(frozen=True)
class Row:
    title: str
    outcomes: dict[str, list[Outcome]]
    out_of_contest: frozenset[str]

    def ettr(self, name: str) -> tuple[float, float]:
        return mean_and_error([outcome.ettr for outcome in self.outcomes[name]])

    def overhead(self, name: str) -> tuple[float, float]:
        return mean_and_error([outcome.overhead for outcome in self.outcomes[name]])

    def best_other(self) -> str:
        others = [name for name in NAMES if name != OURS and name not in self.out_of_contest]
        return max(others, key=lambda name: self.ettr(name)[0])

    def gap(self) -> tuple[float, float]:
        """Ours minus the best other, with the error of paired differences."""
        best = self.outcomes[self.best_other()]
        return mean_and_error([a.ettr - b.ettr for a, b in zip(self.outcomes[OURS], best, strict=True)])


def play(title: str, job: Job, *, prior: float, num_runs: int) -> Row:
    makers: dict[str, Callable[[], Policy]] = {
        "fixed 30 min": lambda: Fixed(1800.0),
        "fixed 4 h": lambda: Fixed(4 * 3600.0),
        "CheckFreq": lambda: CheckFreq(MAX_OVERHEAD),
        "Young/Daly": lambda: YoungDaly(job.gpu_days_per_failure),
        "continuous": Continuous,
        OURS: lambda: Tuned(Limits(max_overhead=MAX_OVERHEAD), prior_gpu_days_per_failure=prior),
    }
    outcomes = {name: run(job, make, num_runs) for name, make in makers.items()}
    outcomes["best fixed"] = best_fixed(job, num_runs)
    out = [name for name, make in makers.items() if name != OURS and breaks_bound(make(), job)]
    return Row(title, outcomes, frozenset(out))


def breaks_bound(policy: Policy, job: Job) -> bool:
    """Whether it costs more than the bound at some size of the job while nothing fails."""
    costs = job.costs
    for num_gpus in (job.num_gpus, *(num_gpus for _, num_gpus in job.resizes)):
        view = View(costs=costs, has_measured=True, num_gpus=num_gpus, gpu_days=0.0, num_failures=0)
        # A snapshot waits for the persist before it.
        interval_s = max(policy.interval_s(view), (1 - costs.slowdown) * costs.persist_s)
        if costs.checkpoint_s / interval_s > MAX_OVERHEAD * 1.001:
            return True
    return False


def run(job: Job, make: Callable[[], Policy], num_runs: int) -> list[Outcome]:
    return [simulate(job, make(), seed=seed) for seed in range(num_runs)]


def best_fixed(job: Job, num_runs: int) -> list[Outcome]:
    """The best of a grid around what the formula says for the largest size, within the bound."""
    cost_s = job.costs.checkpoint_s
    least_s = max(cost_s / MAX_OVERHEAD, feasible_interval_s(job.costs))
    sizes = [job.num_gpus, *(num_gpus for _, num_gpus in job.resizes)]
    failures = Failures(gpu_days_per_failure=job.gpu_days_per_failure, num_gpus=max(sizes))
    middle_s = best_interval_s(cost_s, failures.mttf_s)
    candidates_s = {max(middle_s * factor, least_s) for factor in (0.6, 0.8, 1.0, 1.25, 1.6, 2.5)}
    tried = [run(job, lambda s=every_s: Fixed(s), num_runs) for every_s in sorted(candidates_s)]
    return max(tried, key=lambda outcomes: statistics.fmean(outcome.ettr for outcome in outcomes))


def sizes_and_costs(num_runs: int, days: float, *, quick: bool) -> list[Row]:
    sizes = (8, 1_024, 100_000) if quick else SIZES
    return [
        play(
            f"{num_gpus:,} {name}",
            Job(
                costs=costs,
                num_gpus=num_gpus,
                gpu_days_per_failure=DEFAULT_GPU_DAYS_PER_FAILURE,
                duration_s=days * DAY_S,
            ),
            prior=DEFAULT_GPU_DAYS_PER_FAILURE,
            num_runs=num_runs,
        )
        for name, costs in COSTS.items()
        for num_gpus in sizes
    ]


def wrong_priors(num_runs: int, days: float, *, quick: bool) -> list[Row]:
    """The prior stays; the fleet fails more or less often than it says."""
    factors = (0.2, 11.0) if quick else (0.2, 1.0, 5.0, 11.0, 50.0)
    base = Job(
        costs=COSTS["middle"],
        num_gpus=1_024,
        gpu_days_per_failure=DEFAULT_GPU_DAYS_PER_FAILURE,
        duration_s=days * DAY_S,
    )
    rows = []
    for factor in factors:
        truth = DEFAULT_GPU_DAYS_PER_FAILURE / factor
        job = dataclasses.replace(base, gpu_days_per_failure=truth)
        title = f"prior {factor:g}x the truth"
        rows.append(play(title, job, prior=DEFAULT_GPU_DAYS_PER_FAILURE, num_runs=num_runs))
    return rows


def hard_cases(num_runs: int, days: float, *, quick: bool) -> list[Row]:
    base = Job(
        costs=COSTS["middle"],
        num_gpus=1_024,
        gpu_days_per_failure=DEFAULT_GPU_DAYS_PER_FAILURE,
        duration_s=days * DAY_S,
    )
    third_s = days * DAY_S / 3
    jobs = {
        "8 -> 1,024 -> 8": dataclasses.replace(
            base, num_gpus=8, resizes=((third_s, 1_024), (2 * third_s, 8))
        ),
        "8 -> 16,384 -> 8": dataclasses.replace(
            base, num_gpus=8, resizes=((third_s, 16_384), (2 * third_s, 8))
        ),
        "heavy-tailed persist": dataclasses.replace(base, num_gpus=16_384, persist_spread=1.0),
        "Weibull, shape 0.7": dataclasses.replace(base, failures=Weibull(0.7)),
        "bathtub": dataclasses.replace(base, failures=Bathtub()),
        "spot, 8 GPUs": dataclasses.replace(base, num_gpus=8, gpu_days_per_failure=0.5),
    }
    names = ("8 -> 1,024 -> 8", "spot, 8 GPUs") if quick else tuple(jobs)
    return [play(name, jobs[name], prior=DEFAULT_GPU_DAYS_PER_FAILURE, num_runs=num_runs) for name in names]


def print_rows(title: str, rows: Sequence[Row]) -> None:
    print(f"\n### {title}\n")
    print(f"ETTR in %, standard error at most {max_error(rows):.2f}; gap in points\n")
    print("| case | " + " | ".join(NAMES) + " | gap to the best |")
    print("|---|" + "---:|" * (len(NAMES) + 1))
    for row in rows:
        cells = [
            f"{row.ettr(name)[0] * 100:.2f}{'*' if name in row.out_of_contest else ''}" for name in NAMES
        ]
        gap, error = row.gap()
        print(f"| {row.title} | " + " | ".join(cells) + f" | {gap * 100:+.2f} ± {error * 100:.2f} |")
    print("\nMeasured overhead in %\n")
    print("| case | " + " | ".join(NAMES) + " |")
    print("|---|" + "---:|" * len(NAMES))
    for row in rows:
        cells = [f"{row.overhead(name)[0] * 100:.2f}" for name in NAMES]
        print(f"| {row.title} | " + " | ".join(cells) + " |")


def max_error(rows: Sequence[Row]) -> float:
    return max(row.ettr(name)[1] for row in rows for name in NAMES) * 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes, runs and days")
    parser.add_argument("--runs", type=int, help="simulated runs per case")
    parser.add_argument("--days", type=float, help="length of each run")
    options = parser.parse_args()
    quick = options.quick
    num_runs = options.runs or (3 if quick else 16)
    days = options.days or (5.0 if quick else 30.0)
    started_s = time.perf_counter()
    print(f"{num_runs} runs of {days:g} days each, failures {Exponential.__name__.lower()} unless said")
    for title, cases in (
        ("Sizes and costs", sizes_and_costs),
        ("Wrong priors, 1,024 GPUs", wrong_priors),
        ("Hard cases, 1,024 GPUs unless said", hard_cases),
    ):
        rows = cases(num_runs, days, quick=quick)
        print_rows(title, rows)
        worst = min(rows, key=lambda row: row.gap()[0])
        print(f"\nLargest gap to the best other policy: {worst.gap()[0] * 100:+.2f} points ({worst.title})")
    print(f"\n{time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
