"""The simulation: against the formula, reproducible, and fair."""

import itertools
import random
import statistics

import pytest

from raycheck.core.interval import DAY_S, Costs, Failures, Limits, choose_interval, ettr
from raycheck.core.simulate import (
    Bathtub,
    CheckFreq,
    Continuous,
    Exponential,
    Fixed,
    Job,
    Recorded,
    Tuned,
    View,
    Weibull,
    YoungDaly,
    compare,
    mean_and_error,
    simulate,
)

COSTS = Costs(step_s=1.0, stall_s=2.0, persist_s=120.0, slowdown=0.03, restart_s=600.0)


def job(**fields):
    return Job(
        **{
            "costs": COSTS,
            "num_gpus": 16_384,
            "gpu_days_per_failure": 3748.0,
            "duration_s": 20 * DAY_S,
            **fields,
        }
    )


@pytest.mark.parametrize(("num_gpus", "interval_s"), [(16_384, 467.0), (16_384, 2_000.0), (100_000, 187.0)])
def test_it_agrees_with_the_formula(num_gpus, interval_s):
    """Within 0.1 points and three standard errors."""
    outcomes = [simulate(job(num_gpus=num_gpus), Fixed(interval_s), seed=seed).ettr for seed in range(20)]
    mean, error = mean_and_error(outcomes)
    predicted = ettr(
        interval_s,
        checkpoint_s=5.6,
        persist_s=120.0,
        restart_s=600.0,
        mttf_s=Failures(gpu_days_per_failure=3748.0, num_gpus=num_gpus).mttf_s,
    )
    assert abs(mean - predicted) < 0.001 + 3 * error


def test_the_same_seed_is_the_same_fate():
    """Reproducible to the bit; another seed differs."""
    uneven = job(persist_spread=0.5, failures=Weibull(0.7))
    first = simulate(uneven, Tuned(Limits()), seed=3)
    assert simulate(uneven, Tuned(Limits()), seed=3) == first
    assert simulate(uneven, Tuned(Limits()), seed=4) != first


def test_policies_meet_the_same_failures():
    """Whatever they do, the n-th failure comes at the n-th time."""
    outcomes = compare(
        job(costs=Costs(step_s=1.0, stall_s=1.0, persist_s=10.0)),
        {"often": lambda: Fixed(300.0), "seldom": lambda: Fixed(7_200.0)},
        num_runs=3,
    )
    assert [o.num_failures for o in outcomes["often"]] == [o.num_failures for o in outcomes["seldom"]]


def test_time_is_accounted_for():
    """Training kept, training lost, overhead and restarts are all of the wall time."""
    for failures in (Exponential(), Weibull(), Bathtub()):
        out = simulate(job(failures=failures), Fixed(600.0), seed=1)
        parts_s = out.trained_s + out.recomputed_s + out.overhead_s + out.restarting_s
        assert parts_s == pytest.approx(out.duration_s)
        assert out.num_failures > 20


def test_without_failures_only_the_overhead_is_lost():
    """The bound of 3.5 % costs 1 / 1.035."""
    out = simulate(job(gpu_days_per_failure=1e12), CheckFreq(0.035), seed=0)
    assert out.ettr == pytest.approx(160 / 165.6, rel=1e-3)
    assert out.overhead == pytest.approx(0.035, rel=1e-3)
    assert (out.num_failures, out.recomputed_s) == (0, 0.0)


def test_recorded_failures_cost_what_they_should():
    """One failure 50 s after a durable checkpoint's snapshot and one during the restart."""
    costs = Costs(step_s=1.0, stall_s=0.0, persist_s=10.0, restart_s=100.0)
    fate = Recorded((1_050.0, 1_100.0))
    out = simulate(job(costs=costs, failures=fate, duration_s=2_000.0), Fixed(500.0), seed=0)
    assert out.num_failures == 2
    assert out.recomputed_s == pytest.approx(50.0)
    assert out.restarting_s == pytest.approx(150.0)
    assert out.trained_s == pytest.approx(1_800.0)


def test_a_snapshot_that_was_not_yet_durable_is_lost():
    """A failure while it persists falls back to the one before."""
    costs = Costs(step_s=1.0, stall_s=0.0, persist_s=100.0)
    out = simulate(job(costs=costs, failures=Recorded((550.0,)), duration_s=800.0), Fixed(500.0), seed=0)
    assert out.recomputed_s == pytest.approx(550.0)


def test_one_persist_at_a_time():
    """The continuous policy saves when the last persist has ended, not more often."""
    out = simulate(job(gpu_days_per_failure=1e12, duration_s=12_200.0), Continuous(), seed=0)
    assert out.num_checkpoints == pytest.approx(100, abs=1)


def test_a_resize_saves_and_changes_the_rate():
    """Nothing is lost at it, and failures come with the new size."""
    small = job(num_gpus=8, failures=Exponential(), duration_s=DAY_S)
    grown = job(num_gpus=8, resizes=((DAY_S / 2, 100_000),), duration_s=DAY_S)
    assert simulate(small, Fixed(600.0), seed=1).num_failures == 0
    out = simulate(grown, Fixed(600.0), seed=1)
    assert 5 <= out.num_failures <= 30
    quiet = job(gpu_days_per_failure=1e12, resizes=((DAY_S / 2, 8),), duration_s=DAY_S)
    out = simulate(quiet, Fixed(50_000.0), seed=1)
    assert (out.recomputed_s, out.restarting_s) == (0.0, 600.0)


@pytest.mark.parametrize("model", [Exponential(), Weibull(0.7), Bathtub()])
def test_gaps_have_mean_one(model):
    """So that every model fails as often."""
    gaps = list(itertools.islice(model.gaps(random.Random(0)), 20_000))
    assert statistics.fmean(gaps) == pytest.approx(1.0, abs=0.04)
    assert min(gaps) >= 0


def test_the_bathtub_has_two_ends():
    """Early and late lifetimes are common, those between are rare."""
    gaps = list(itertools.islice(Bathtub().gaps(random.Random(0)), 5_000))
    longest = max(gaps)
    tenths = [sum(i <= 10 * gap / longest < i + 1 for gap in gaps) for i in range(10)]
    assert min(tenths[0], tenths[9]) > 5 * max(tenths[3:7])


def test_ours_is_close_to_what_knows_the_truth():
    """Thirty days at 1,024 GPUs with a prior that is 11 times too good: within 0.3 points."""
    truth = 3748.0 / 11
    real = job(num_gpus=1_024, gpu_days_per_failure=truth, duration_s=30 * DAY_S)
    outcomes = compare(
        real, {"ours": lambda: Tuned(Limits()), "oracle": lambda: YoungDaly(truth)}, num_runs=6
    )
    gaps = [a.ettr - b.ettr for a, b in zip(outcomes["ours"], outcomes["oracle"], strict=True)]
    assert statistics.fmean(gaps) > -0.003


def test_ours_begins_early_and_then_decides_as_the_interval_does():
    """The first checkpoint is early; later the decision of the core."""
    policy = Tuned(Limits(), prior_gpu_days_per_failure=3748.0)
    view = View(costs=COSTS, has_measured=False, num_gpus=8, gpu_days=0.0, num_failures=0)
    assert policy.interval_s(view) == 10.0
    later = View(costs=COSTS, has_measured=True, num_gpus=8, gpu_days=20_000.0, num_failures=5)
    expected = choose_interval(COSTS, Failures(gpu_days_per_failure=4_444, num_gpus=8), Limits())
    assert policy.interval_s(later) == pytest.approx(expected.interval_s, rel=0.1)


def test_endless_checkpoints_are_refused():
    """A policy that never trains would never end."""
    free = Costs(step_s=0.0, stall_s=0.0, persist_s=0.0)
    with pytest.raises(ValueError, match="without end"):
        simulate(job(costs=free), Fixed(0.0), seed=0)
    with pytest.raises(ValueError, match="duration_s"):
        job(duration_s=float("inf"))


def test_one_value_has_no_error():
    """A standard error needs two."""
    mean, error = mean_and_error([0.5])
    assert mean == 0.5
    assert error != error
