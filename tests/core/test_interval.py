"""The interval: formulas, constraints, conflicts, and how a decision follows the job."""

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from raycheck.core.efficiency import one_plus_w0
from raycheck.core.interval import (
    DAY_S,
    Costs,
    Failures,
    Limits,
    best_interval_s,
    choose_interval,
    ettr,
    feasible_interval_s,
    overhead,
    split_loss,
)
from raycheck.errors import ConfigError

ANCHOR = Costs(step_s=1.0, stall_s=2.0, persist_s=120.0, slowdown=0.03, restart_s=600.0)
GPU_DAYS = 3748.0


def fleet(num_gpus, gpu_days=GPU_DAYS):
    return Failures(gpu_days_per_failure=gpu_days, num_gpus=num_gpus)


def ettr_of(interval_s, costs, failures):
    return ettr(
        interval_s,
        checkpoint_s=costs.checkpoint_s,
        persist_s=costs.persist_s,
        restart_s=costs.restart_s,
        mttf_s=failures.mttf_s,
    )


# Formulas.


@pytest.mark.parametrize(
    ("num_gpus", "interval_s", "ettr_percent", "checkfreq_percent"),
    [
        (8, 21_289, 99.95, 96.62),
        (1_024, 1_878, 99.18, 96.37),
        (16_384, 467, 94.15, 92.77),
        (100_000, 187, 75.45, 75.40),
    ],
)
def test_anchors(num_gpus, interval_s, ettr_percent, checkfreq_percent):
    """Interval and efficiency from 8 to 100,000 GPUs, and what the bound alone would reach."""
    failures = fleet(num_gpus)
    decision = choose_interval(ANCHOR, failures, Limits())
    assert decision.decided_by == "risk"
    assert decision.interval_s == pytest.approx(interval_s, abs=0.7)
    assert 100 * decision.ettr == pytest.approx(ettr_percent, abs=0.005)
    rule = choose_interval(ANCHOR, None, Limits())
    assert rule.decided_by == "overhead_bound"
    assert rule.interval_s == pytest.approx(160.0)
    assert 100 * ettr_of(rule.interval_s, ANCHOR, failures) == pytest.approx(checkfreq_percent, abs=0.006)


@pytest.mark.parametrize("x", [1e-9, 1e-6, 4e-5, 6e-5, 1e-3, 0.1, 0.99, 1.01, 3.0, 30.0, 300.0])
def test_lambert_agrees_with_scipy(x):
    """Ours is SciPy's main branch, to the digits that SciPy has near the branch point."""
    theirs = 1 + lambertw(-math.exp(-1 - x)).real
    lost = 1e-16 / x  # forming the argument near -1/e loses this much
    assert one_plus_w0(x) == pytest.approx(theirs, rel=1e-10 + lost)


@given(st.floats(1e-3, 10))
def test_lambert_solves_its_equation(x):
    """(1 - u) exp(u) = exp(-x), in logarithms."""
    u = one_plus_w0(x)
    assert -math.log1p(-u) - u == pytest.approx(x, rel=1e-9)


@given(st.floats(1e-200, 1e-4))
def test_small_costs_agree_with_young_and_daly(x):
    """Near the branch point the interval is Young's, with Daly's second-order term."""
    young = math.sqrt(2 * x)
    assert one_plus_w0(x) == pytest.approx(young - 2 * x / 3, rel=x)


def test_daly_agrees_where_costs_are_small():
    """Daly's higher-order estimate: sqrt(2cM)·(1 + sqrt(c/2M)/3 + (c/2M)/9) - c."""
    cost_s, mttf_s = 5.6, fleet(16_384).mttf_s
    ratio = math.sqrt(cost_s / (2 * mttf_s))
    daly_s = math.sqrt(2 * cost_s * mttf_s) * (1 + ratio / 3 + ratio**2 / 9) - cost_s
    assert best_interval_s(cost_s, mttf_s) == pytest.approx(daly_s, rel=1e-5)


@given(st.floats(0.01, 1e4), st.floats(1.0, 1e8))
def test_the_best_interval_is_where_efficiency_peaks(cost_s, mttf_s):
    """No numeric search finds a better one."""
    assume(1e-6 < cost_s / mttf_s < 5)
    best_s = best_interval_s(cost_s, mttf_s)

    def loss(log_s):
        return -ettr(math.exp(log_s), checkpoint_s=cost_s, persist_s=0, restart_s=0, mttf_s=mttf_s)

    middle = math.log(best_s)
    found = minimize_scalar(loss, bounds=(middle - 2, middle + 2), method="bounded")
    assert -loss(middle) >= -found.fun - 1e-12
    assert best_s == pytest.approx(math.exp(found.x), rel=0.02)


@given(st.sampled_from([8, 1_024, 100_000]), st.floats(10, 1e6))
def test_the_loss_adds_up(num_gpus, interval_s):
    """Stall, slower steps, recomputing and restarts are all there is."""
    failures = fleet(num_gpus)
    split = split_loss(interval_s, ANCHOR, failures)
    assert split.total == pytest.approx(1 - ettr_of(interval_s, ANCHOR, failures), abs=1e-12)
    assert min(dataclasses.astuple(split)) >= 0


def test_the_bound_decides_when_failures_are_more_frequent_than_c_over_2b_squared():
    """To first order the bound binds only below M = c / (2 b²)."""
    threshold_s = ANCHOR.checkpoint_s / (2 * 0.035**2)
    assert feasible_interval_s(ANCHOR) < ANCHOR.checkpoint_s / 0.035
    for factor, term in ((0.8, "overhead_bound"), (1.3, "risk")):
        gpu_days = factor * threshold_s * 8 / DAY_S
        assert choose_interval(ANCHOR, fleet(8, gpu_days), Limits()).decided_by == term


# The choice.


def test_without_a_rate_it_is_the_rule_of_checkfreq():
    """Cost bound and feasibility; nothing is predicted about failures."""
    slow = dataclasses.replace(ANCHOR, slowdown=0.0, persist_s=600.0)
    decision = choose_interval(slow, None, Limits())
    assert (decision.decided_by, decision.ettr, decision.best_ettr) == ("feasibility", None, None)
    assert decision.period_s == pytest.approx(660.0)
    assert decision.constraints == ()


@pytest.mark.parametrize(
    ("costs", "limits", "term", "period_s"),
    [
        (ANCHOR, Limits(recovery_point_s=900.0), "recovery_point", 780.0),
        (ANCHOR, Limits(max_interval_s=300.0), "max_interval", 300.0),
        (ANCHOR, Limits(min_interval_s=50_000.0), "min_interval", 50_000.0),
        (dataclasses.replace(ANCHOR, step_s=30_000.0, persist_s=0.0), Limits(), "feasibility", 240_000.0),
        (
            Costs(step_s=30_000.0, stall_s=0.0, persist_s=0.0),
            Limits(max_in_flight=16),
            "one_step",
            30_000.0,
        ),
        (ANCHOR, Limits(interval_steps=50), "fixed", 55.6),
    ],
)
def test_each_term_can_decide(costs, limits, term, period_s):
    """At 8 GPUs, where risk alone would say 21,288 s."""
    decision = choose_interval(costs, fleet(8), limits)
    assert (decision.decided_by, decision.period_s) == (term, pytest.approx(period_s))
    assert decision.reason


def test_a_slow_tail_counts_for_uploads_and_the_average_for_the_cost():
    """Heavy-tailed uploads lengthen the interval without being charged as if all were slow."""
    tailed = dataclasses.replace(ANCHOR, persist_tail_s=1000.0)
    decision = choose_interval(tailed, fleet(100_000), Limits())
    assert decision.decided_by == "feasibility"
    assert decision.period_s == pytest.approx(1100.0)
    assert decision.costs.checkpoint_s == pytest.approx(5.6)


def test_a_constraint_tells_its_price():
    """The loss of a binding constraint is against the best interval."""
    decision = choose_interval(ANCHOR, fleet(1_024), Limits(recovery_point_s=400.0))
    (constraint,) = decision.constraints
    assert constraint.term == "recovery_point"
    assert constraint.loss == pytest.approx(decision.best_ettr - decision.ettr)
    assert 0.005 < constraint.loss < 0.02


@pytest.mark.parametrize(
    ("costs", "limits", "steps"),
    [
        (dataclasses.replace(ANCHOR, step_s=100.0), Limits(), 213),
        (dataclasses.replace(ANCHOR, step_s=7.0), Limits(recovery_point_s=900.0), 110),
        (dataclasses.replace(ANCHOR, step_s=7.0), Limits(min_interval_s=40_000.0), 5_714),
    ],
)
def test_steps_round_to_the_side_that_keeps_the_limits(costs, limits, steps):
    """To the nearest for risk, down below a ceiling, up above a floor."""
    assert choose_interval(costs, fleet(8), limits).interval_steps == steps


# Conflicts.

DEAR = Costs(step_s=1.0, stall_s=10.0, persist_s=20.0, slowdown=0.05, restart_s=60.0)  # c = 11, c/b = 314
TIGHT = Limits(recovery_point_s=120.0)


def test_a_conflict_may_keep_the_bound():
    """The recovery point gives way, and the reason says how much may be lost."""
    decision = choose_interval(DEAR, fleet(64), TIGHT)
    assert decision.decided_by == "overhead_bound"
    assert decision.overhead == pytest.approx(0.035)
    assert decision.reason == (
        "interval 314 s: a checkpoint costs 11 s and may take 3.5 % of training; "
        "recovery_point_s is not kept: up to 345 s of training may be lost"
    )


def test_a_conflict_may_keep_the_recovery_point():
    """The bound gives way, and the reason says to what."""
    limits = dataclasses.replace(TIGHT, on_conflict="recovery_point")
    decision = choose_interval(DEAR, fleet(64), limits)
    assert decision.decided_by == "recovery_point"
    assert decision.period_s + DEAR.persist_s == pytest.approx(120.0)
    assert decision.reason == (
        "interval 89 s: at most 120 s of training may be lost; "
        "recovery_point_s is kept at 12.4 % overhead, 3.5 % were allowed"
    )


def test_a_conflict_may_refuse_the_start_but_never_a_running_job():
    """The error names the setting and both prices; later the bound is kept."""
    limits = dataclasses.replace(TIGHT, on_conflict="error")
    with pytest.raises(ConfigError) as caught:
        choose_interval(DEAR, fleet(64), limits)
    assert (caught.value.field, caught.value.value) == ("recovery_point_s", 120.0)
    assert "recovery_point_s=120.0 cannot be kept: max_overhead=0.035" in str(caught.value)
    assert "costs 12.4 % overhead" in str(caught.value)
    assert "loses up to 345 s" in str(caught.value)
    cheap = dataclasses.replace(DEAR, stall_s=0.5, slowdown=0.0)
    started = choose_interval(cheap, fleet(64), limits)
    assert choose_interval(DEAR, fleet(64), limits, previous=started).decided_by == "overhead_bound"


@pytest.mark.parametrize("on_conflict", ["bound", "recovery_point"])
def test_feasibility_holds_whatever_gives_way(on_conflict):
    """Uploads of 200 s cannot give a recovery point of 120 s."""
    slow = dataclasses.replace(DEAR, persist_s=200.0, slowdown=0.0, stall_s=0.1)
    limits = dataclasses.replace(TIGHT, on_conflict=on_conflict)
    decision = choose_interval(slow, fleet(64), limits)
    assert decision.decided_by == "feasibility"
    assert "recovery_point_s cannot be kept: up to 420 s of training may be lost" in decision.reason


def test_a_fixed_interval_that_uploads_cannot_follow_says_so():
    """The user's number stands; some checkpoints are skipped."""
    decision = choose_interval(ANCHOR, fleet(8), Limits(interval_steps=10))
    assert decision.interval_steps == 10
    assert (
        decision.reason
        == "interval 10 s: every 10 steps, as interval_steps says; an upload takes up to 120 s, so some are skipped"
    )


# Following the job.


def test_a_resize_is_followed_and_explained():
    """8 to 1,024 GPUs and back, each in one decision and one sentence."""
    small = choose_interval(ANCHOR, fleet(128), Limits())
    large = choose_interval(ANCHOR, fleet(1_024), Limits(), previous=small)
    back = choose_interval(ANCHOR, fleet(128), Limits(), previous=large)
    assert large.reason == (
        "interval 5,319 s -> 1,878 s: 1,024 GPUs instead of 128, "
        "expected time to failure 3.7 days, a checkpoint costs 5.6 s"
    )
    assert back.interval_s == small.interval_s
    assert back.reason.startswith("interval 1,878 s -> 5,319 s: 128 GPUs instead of 1,024")


def test_risk_keeps_an_interval_that_is_near_the_best():
    """Within 0.8 to 1.25 nothing moves, and that costs at most 3 % of the loss."""
    start = choose_interval(ANCHOR, fleet(1_024), Limits())
    for factor in (0.66, 0.8, 1.2, 1.5):
        now = choose_interval(ANCHOR, fleet(1_024, GPU_DAYS * factor), Limits(), previous=start)
        assert now.interval_s == start.interval_s
        assert now.reason.startswith("interval 1,878 s kept")
        free = dataclasses.replace(ANCHOR, restart_s=0.0)
        best = 1 - ettr_of(now.best_interval_s, free, now.failures)
        assert 1 - ettr_of(now.interval_s, free, now.failures) <= best * 1.03
    moved = choose_interval(ANCHOR, fleet(1_024, GPU_DAYS * 1.7), Limits(), previous=start)
    assert moved.interval_s == moved.best_interval_s > start.interval_s


def test_limits_act_at_once():
    """No hysteresis for the bound, uploads and the recovery point."""
    start = choose_interval(ANCHOR, fleet(100_000), Limits())
    dearer = dataclasses.replace(ANCHOR, stall_s=3.5)  # c/b = 203 s against 187 s
    assert choose_interval(dearer, fleet(100_000), Limits(), previous=start).interval_s >= 7.1 / 0.035
    slower = dataclasses.replace(ANCHOR, persist_tail_s=185.0)
    now = choose_interval(slower, fleet(100_000), Limits(), previous=start)
    assert (now.decided_by, now.period_s) == ("feasibility", pytest.approx(203.5))
    now = choose_interval(ANCHOR, fleet(100_000), Limits(recovery_point_s=300.0), previous=start)
    assert (now.decided_by, now.period_s) == ("recovery_point", pytest.approx(180.0))


@given(st.lists(st.floats(0.85, 1.15), min_size=2, max_size=12))
def test_noisy_costs_do_not_make_it_oscillate(factors):
    """Measurements that wander by 15 % never move an interval that risk decides."""
    decision = choose_interval(ANCHOR, fleet(1_024), Limits())
    first_s = decision.interval_s
    for factor in factors:
        noisy = dataclasses.replace(ANCHOR, stall_s=2.0 * factor, persist_s=120.0 * factor)
        decision = choose_interval(noisy, fleet(1_024), Limits(), previous=decision)
        assert decision.interval_s == first_s


# Properties.

seconds = st.floats(0, 1e6)
any_seconds = st.one_of(seconds, st.sampled_from([0.0, 5e-324, 1e-300, 1e300, math.inf]))


@st.composite
def cost_records(draw, numbers=any_seconds):
    return Costs(
        step_s=draw(numbers),
        stall_s=draw(numbers),
        persist_s=draw(numbers),
        slowdown=draw(st.one_of(st.floats(0, 2), st.sampled_from([0.0, 1e-300, math.inf]))),
        restart_s=draw(numbers),
        persist_tail_s=draw(st.none() | numbers),
    )


fleets = st.builds(
    Failures,
    gpu_days_per_failure=st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, 1e-300, math.inf])),
    num_gpus=st.integers(1, 1_000_000),
)
limit_records = st.builds(
    Limits,
    max_overhead=st.one_of(st.floats(1e-4, 0.5), st.sampled_from([5e-324, 1e-300])),
    recovery_point_s=st.none() | st.floats(1e-3, 1e6) | st.just(math.inf),
    min_interval_s=st.none() | st.floats(1e-3, 1e6),
    max_interval_s=st.none() | st.floats(1e-3, 1e6),
    max_in_flight=st.integers(1, 2),
    on_conflict=st.sampled_from(["bound", "recovery_point"]),
)


@given(cost_records(), st.none() | fleets, limit_records)
def test_there_is_always_an_answer(costs, failures, limits):
    """Zero, tiny, huge and infinite inputs: no NaN, no exception, never below feasibility or a step."""
    decision = choose_interval(costs, failures, limits)
    for value in (decision.interval_s, decision.overhead, decision.period_s):
        assert value >= 0
    for value in (decision.ettr, decision.best_ettr):
        assert value is None or 0 <= value <= 1
    assert all(0 <= constraint.loss <= 1 for constraint in decision.constraints)
    assert decision.interval_s >= feasible_interval_s(costs, max_in_flight=limits.max_in_flight)
    assert decision.interval_s >= costs.step_s
    assert decision.interval_steps >= 1
    assert "nan" not in decision.reason
    if failures is not None:
        assert 0 <= split_loss(decision.interval_s, costs, failures).total <= 1 + 1e-9
    again = choose_interval(costs, failures, limits, previous=decision)
    assert again.interval_s == decision.interval_s


costs_in_seconds = st.floats(1e-3, 1e4)
plain_costs = st.builds(
    Costs,
    step_s=costs_in_seconds,
    stall_s=costs_in_seconds,
    persist_s=costs_in_seconds,
    slowdown=st.floats(0, 0.5),
    restart_s=costs_in_seconds,
)
growth = st.floats(1.0, 100.0)


def at_least(a, b):
    return a >= b * (1 - 1e-9)


@given(plain_costs, st.integers(1, 100_000), growth)
def test_dearer_or_slower_checkpoints_come_no_more_often(costs, num_gpus, factor):
    """The period grows with stall, persist time and slowdown."""
    failures = fleet(num_gpus)
    before = choose_interval(costs, failures, Limits())
    for field in ("stall_s", "persist_s", "slowdown", "step_s"):
        dearer = dataclasses.replace(costs, **{field: getattr(costs, field) * factor})
        assert at_least(choose_interval(dearer, failures, Limits()).period_s, before.period_s)


@given(plain_costs, st.integers(1, 10_000), growth)
def test_riskier_jobs_checkpoint_no_less_often(costs, num_gpus, factor):
    """The interval shrinks with GPUs and with failures per GPU-day, and efficiency with it."""
    before = choose_interval(costs, fleet(num_gpus), Limits())
    for riskier in (fleet(math.ceil(num_gpus * factor)), fleet(num_gpus, GPU_DAYS / factor)):
        now = choose_interval(costs, riskier, Limits())
        assert at_least(before.interval_s, now.interval_s)
        assert at_least(before.best_ettr, now.best_ettr)


@given(plain_costs, st.integers(1, 100_000), st.floats(0.001, 0.5), growth)
def test_a_looser_limit_is_never_worse(costs, num_gpus, bound, factor):
    """A higher bound shortens, a longer recovery point lengthens; both only help."""
    failures = fleet(num_gpus)
    tight = choose_interval(costs, failures, Limits(max_overhead=bound))
    loose = choose_interval(costs, failures, Limits(max_overhead=bound * factor))
    assert at_least(tight.interval_s, loose.interval_s)
    assert at_least(loose.ettr, tight.ettr)
    point_s = 10 * costs.persist_s
    keep = {"on_conflict": "recovery_point"}
    tight = choose_interval(costs, failures, Limits(recovery_point_s=point_s, **keep))
    loose = choose_interval(costs, failures, Limits(recovery_point_s=point_s * factor, **keep))
    assert at_least(loose.interval_s, tight.interval_s)


@given(plain_costs, st.integers(1, 100_000))
def test_the_bound_and_the_recovery_point_are_kept(costs, num_gpus):
    """Where nothing conflicts, both hold."""
    point_s = 3 * (costs.checkpoint_s / 0.035 + feasible_interval_s(costs) + costs.persist_s + costs.step_s)
    decision = choose_interval(costs, fleet(num_gpus), Limits(recovery_point_s=point_s))
    assert decision.overhead <= 0.035 * (1 + 1e-9)
    assert decision.period_s + costs.persist_s <= point_s * (1 + 1e-9)


@pytest.mark.parametrize("bad", [-1.0, math.nan, -math.inf])
def test_bad_numbers_are_named(bad):
    """Whatever is negative or not a number is refused by its name."""
    good = {"step_s": 1.0, "stall_s": 1.0, "persist_s": 1.0}
    for field in ("step_s", "stall_s", "persist_s", "slowdown", "restart_s", "persist_tail_s"):
        with pytest.raises(ValueError, match=field):
            Costs(**{**good, field: bad})
    with pytest.raises(ValueError, match="gpu_days_per_failure"):
        fleet(8, bad)
    for field in ("max_overhead", "recovery_point_s", "min_interval_s", "max_interval_s"):
        with pytest.raises(ValueError, match=field):
            Limits(**{field: bad})
    formula = {"checkpoint_s": 1.0, "persist_s": 1.0, "restart_s": 1.0, "mttf_s": 1.0}
    for field in formula:
        with pytest.raises(ValueError, match=field):
            ettr(1.0, **{**formula, field: bad})
    with pytest.raises(ValueError, match="interval_s"):
        ettr(bad, **formula)
    with pytest.raises(ValueError, match="mttf_s"):
        best_interval_s(1.0, bad)


def test_a_job_has_at_least_one_gpu():
    """Zero would mean a job that never fails."""
    with pytest.raises(ValueError, match="num_gpus"):
        fleet(0)


def test_overhead_of_free_and_endless_checkpoints():
    """The edges of a division."""
    assert overhead(0.0, 0.0) == 0.0
    assert overhead(math.inf, 5.0) == 0.0
    assert overhead(10.0, math.inf) == math.inf


def test_costs_scale_with_bytes():
    """Stall and persist follow the bytes per rank, the rest stays."""
    half = dataclasses.replace(ANCHOR, persist_tail_s=200.0).scaled(0.5)
    assert (half.stall_s, half.persist_s, half.persist_tail_s) == (1.0, 60.0, 100.0)
    assert (half.step_s, half.slowdown, half.restart_s) == (1.0, 0.03, 600.0)
