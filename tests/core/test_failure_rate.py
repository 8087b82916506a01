"""The failure rate: a prior that lets go, and evidence that is remembered."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

from raycheck.core.failure_rate import FailureRate
from raycheck.core.interval import Costs, Failures, Limits, choose_interval, ettr

COSTS = Costs(step_s=1.0, stall_s=2.0, persist_s=120.0, slowdown=0.03, restart_s=600.0)


def numeric_mean(gpu_days, num_failures, centre=3748.0):
    """The posterior mean by quadrature over the logarithm of GPU-days per failure."""

    def weight(log_x):
        x = math.exp(log_x)
        return math.exp(-abs(log_x - math.log(centre)) / 2 - num_failures * log_x - gpu_days / x)

    span = (math.log(0.1), math.log(100_000))
    points = sorted({math.log(centre), math.log(max(gpu_days / (num_failures + 0.5), 0.11))})
    total = integrate.quad(weight, *span, points=points, limit=500)[0]
    return integrate.quad(lambda y: weight(y) * math.exp(-y), *span, points=points, limit=500)[0] / total


@pytest.mark.parametrize(
    ("gpu_days", "num_failures"), [(0.0, 0), (0.01, 0), (10.0, 0), (0.5, 1), (40.0, 3), (5_000.0, 2)]
)
def test_the_grid_is_fine_enough(gpu_days, num_failures):
    """Within two percent of an integral that shares no code with it."""
    rate = FailureRate().after(gpu_days=gpu_days, failures={"node": num_failures})
    assert rate.mean_per_gpu_day() == pytest.approx(numeric_mean(gpu_days, num_failures), rel=0.02)


def test_one_failure_on_spot_is_enough():
    """0.5 GPU-days per failure on 8 GPUs: 83.4 % of a possible 83.6, though the prior says 3,748."""
    truth = Failures(gpu_days_per_failure=0.5, num_gpus=8)
    best = choose_interval(COSTS, truth, Limits()).ettr
    rate = FailureRate().after(gpu_days=0.5, failures={"worker": 1})
    believed = Failures(gpu_days_per_failure=rate.gpu_days_per_failure, num_gpus=8)
    interval_s = choose_interval(COSTS, believed, Limits()).interval_s
    reached = ettr(
        interval_s,
        checkpoint_s=COSTS.checkpoint_s,
        persist_s=120.0,
        restart_s=600.0,
        mttf_s=truth.mttf_s,
    )
    assert 100 * best == pytest.approx(83.6, abs=0.05)
    assert 100 * reached == pytest.approx(83.4, abs=0.1)


def test_much_evidence_decides_alone():
    """After 100 failures neither prior matters."""
    for centre in (1.0, 3748.0, 50_000.0):
        rate = FailureRate(prior_gpu_days_per_failure=centre)
        rate = rate.after(gpu_days=50.0, failures={"worker": 100})
        assert rate.gpu_days_per_failure == pytest.approx(0.5, rel=0.03)


def test_quiet_days_calm_it():
    """It expects the worst at first and relaxes with every failure-free day."""
    believed = [FailureRate(gpu_days=days).gpu_days_per_failure for days in (0, 1, 10, 100, 1_000, 10_000)]
    assert believed == sorted(believed)
    assert believed[0] < 50
    assert believed[-1] > 3748


def test_only_failures_that_lose_work_count():
    """A preemption with notice is told, not counted; an exception of the user's code is counted."""
    rate = FailureRate().after(gpu_days=10.0, failures={"preempted": 50})
    assert rate.num_failures == 0
    assert rate.mean_per_gpu_day() == FailureRate(gpu_days=10.0).mean_per_gpu_day()
    rate = rate.after(failures={"worker": 1, "node": 1, "exception": 1})
    assert rate.num_failures == 3
    assert rate.failures["preempted"] == 50


def test_the_evidence_survives_a_new_prior():
    """A fleet's newly measured rate moves the belief, the less the more the run has seen."""
    rate = FailureRate(gpu_days=10.0)
    moved = rate.with_prior(50.0)
    assert (moved.gpu_days, moved.failures) == (10.0, {})
    assert moved.gpu_days_per_failure < rate.gpu_days_per_failure


def test_an_extreme_prior_stays_inside_its_grid():
    """A centre outside 0.1 to 100,000 GPU-days widens the grid."""
    assert FailureRate(prior_gpu_days_per_failure=1e-3).gpu_days_per_failure < 0.01
    calm = FailureRate(prior_gpu_days_per_failure=1e8, gpu_days=1e8)
    assert calm.gpu_days_per_failure > 1e7


evidence = st.builds(
    FailureRate,
    prior_gpu_days_per_failure=st.floats(1e-3, 1e7),
    gpu_days=st.floats(0, 1e9),
    failures=st.dictionaries(
        st.sampled_from(["worker", "node", "exception", "preempted"]), st.integers(0, 100_000)
    ),
)


@given(evidence)
def test_it_survives_json(rate):
    """Plain JSON there and back, and the belief is the same."""
    again = FailureRate.from_dict(json.loads(json.dumps(rate.to_dict())))
    assert again == rate
    assert again.mean_per_gpu_day() == rate.mean_per_gpu_day()


@given(evidence, st.floats(0.5, 0.99))
def test_bounds_are_in_order(rate, credibility):
    """A higher credibility gives a higher rate; all are positive numbers."""
    mean = rate.mean_per_gpu_day()
    assert 0 < mean < math.inf
    assert 0 < rate.upper_per_gpu_day(credibility) <= rate.upper_per_gpu_day(0.999)


@given(st.floats(0, 1e5), st.integers(0, 100), st.floats(0, 1e4))
def test_failures_raise_the_rate_and_quiet_time_lowers_it(gpu_days, num_failures, more_days):
    """Monotone in both kinds of evidence."""
    rate = FailureRate(gpu_days=gpu_days, failures={"worker": num_failures})
    assert rate.after(failures={"worker": 1}).mean_per_gpu_day() >= rate.mean_per_gpu_day() * (1 - 1e-9)
    assert rate.after(gpu_days=more_days).mean_per_gpu_day() <= rate.mean_per_gpu_day() * (1 + 1e-9)


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu_days": -1.0},
        {"gpu_days": math.nan},
        {"gpu_days": math.inf},
        {"prior_gpu_days_per_failure": 0.0},
        {"prior_gpu_days_per_failure": math.inf},
        {"failures": {"meteor": 1}},
        {"failures": {"worker": -1}},
    ],
)
def test_nonsense_is_refused_by_name(fields):
    """The message holds the field."""
    with pytest.raises(ValueError, match=next(iter(fields))):
        FailureRate(**fields)
    with pytest.raises(ValueError, match="gpu_days"):
        FailureRate().after(gpu_days=-1.0)
    with pytest.raises(ValueError, match="credibility"):
        FailureRate().upper_per_gpu_day(1.0)


@pytest.mark.parametrize("fields", [{}, {"gpu_days": 1}, {"failures": 3, "gpu_days": 1}, {"gpu_days": "x"}])
def test_a_damaged_record_is_refused(fields):
    """A ValueError, whatever is wrong."""
    with pytest.raises(ValueError):
        FailureRate.from_dict({"prior_gpu_days_per_failure": 1.0, **fields})
