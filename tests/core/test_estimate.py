"""Estimators: robust against outliers, quick to follow a change, honest about overhead."""

import dataclasses
import math
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core.estimate import (
    CostEstimator,
    MeasuredOverhead,
    OverheadMeter,
    first_checkpoint_after_s,
)
from raycheck.core.interval import Failures, Limits, choose_interval
from raycheck.core.overlap import StepWindow


@dataclasses.dataclass
class Cluster:
    """A job that trains and checkpoints, with truths that a test may turn."""

    step_s: float = 1.0
    stall_s: float = 0.5
    persist_s: float = 20.0
    slowdown: float = 0.1  # training lost per second of persist
    noise: float = 0.03
    num_gpus: int = 1_024
    gpu_days: float = 3748.0

    def __post_init__(self):
        self.rng = random.Random(1)
        self.estimator = CostEstimator()
        self.meter = OverheadMeter()
        self.decision = None
        self.limits = Limits()
        self.count = 0
        self.paused_s = {}  # step number: extra seconds
        self.lost_s = self.inside_s = 0.0
        self.step(overlapped=False, extra_s=60.0)  # the first step compiles

    def step(self, *, overlapped, stall_s=0.0, extra_s=0.0):
        self.count += 1
        base_s = self.step_s * math.exp(self.rng.gauss(0, self.noise))
        slow_s = base_s * self.slowdown / (1 - self.slowdown) if overlapped else 0.0
        pause_s = self.paused_s.get(self.count, 0.0) + extra_s
        for observer in (self.estimator, self.meter):
            observer.observe_step(base_s + slow_s + stall_s + pause_s, overlapped=overlapped, stall_s=stall_s)
        self.lost_s += slow_s + stall_s
        self.inside_s += base_s + slow_s + stall_s
        return base_s + slow_s

    def checkpoint(self, num_free=None, *, persist_s=None):
        """One interval: the snapshot and the persist, then free steps until the next is due."""
        persist_s = self.persist_s if persist_s is None else persist_s
        left_s, stall_s = persist_s, self.stall_s
        while left_s > 0:
            left_s -= self.step(overlapped=True, stall_s=stall_s)
            stall_s = 0.0
        self.estimator.observe_checkpoint(stall_s=self.stall_s, persist_s=persist_s)
        for _ in range(num_free if num_free is not None else self.num_free(persist_s)):
            self.step(overlapped=False)
        self.decide()

    def num_free(self, persist_s):
        """Free steps that the interval in force leaves; a bounded number, for speed."""
        if self.decision is None:
            return 10
        return min(max(int((self.decision.period_s - persist_s) / self.step_s), 8), 40)

    def decide(self):
        failures = Failures(gpu_days_per_failure=self.gpu_days, num_gpus=self.num_gpus)
        self.decision = choose_interval(self.estimator.costs(), failures, self.limits, previous=self.decision)
        return self.decision

    def best_s(self):
        return self.decision.best_interval_s


def settled(**truths):
    cluster = Cluster(**truths)
    for _ in range(10):
        cluster.checkpoint()
    return cluster


def test_nothing_is_known_before_the_first_checkpoint():
    """None, not a guess; then at once something, however long the first persist took."""
    estimator = CostEstimator()
    for _ in range(5):
        estimator.observe_step(1.0, overlapped=False)
    assert estimator.costs() is None
    estimator.observe_checkpoint(stall_s=2.0, persist_s=3600.0)
    costs = estimator.costs()
    assert (costs.stall_s, costs.persist_s, costs.step_s) == (2.0, 3600.0, 1.0)


def test_the_first_checkpoint_and_the_first_step_are_left_out():
    """Warm-up is not the cost of a checkpoint or a step."""
    estimator = CostEstimator()
    estimator.observe_step(300.0, overlapped=False)
    estimator.observe_step(1.0, overlapped=False)
    estimator.observe_checkpoint(stall_s=9.0, persist_s=90.0)
    estimator.observe_checkpoint(stall_s=1.0, persist_s=10.0)
    costs = estimator.costs()
    assert (costs.stall_s, costs.persist_s, costs.step_s) == (1.0, 10.0, 1.0)


def test_a_steady_job_is_measured():
    """All costs come out within their noise."""
    costs = settled().estimator.costs()
    assert costs.step_s == pytest.approx(1.0, rel=0.03)
    assert costs.stall_s == pytest.approx(0.5)
    assert costs.persist_s == pytest.approx(20.0)
    assert costs.slowdown == pytest.approx(0.1, abs=0.03)


def test_the_restart_time_is_the_users_or_measured():
    """A median of this run's own restarts, unless the user gave a number."""
    cluster = settled()
    for seconds in (20.0, 22.0, 500.0):
        cluster.estimator.observe_restart(seconds)
    assert cluster.estimator.costs().restart_s == 22.0
    given_one = CostEstimator(restart_s=7.0)
    given_one.observe_step(1.0, overlapped=False)
    given_one.observe_step(1.0, overlapped=False)
    given_one.observe_checkpoint(stall_s=0.0, persist_s=1.0)
    given_one.observe_restart(99.0)
    assert given_one.costs().restart_s == 7.0


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_hiccup_changes_nothing(overlapped):
    """60 s in one step, or in one upload, is no new cost."""
    cluster = settled()
    before = cluster.decision
    cluster.paused_s = {cluster.count + (3 if overlapped else 30): 60.0}
    cluster.checkpoint()
    cluster.checkpoint(persist_s=80.0)
    cluster.checkpoint()
    costs = cluster.estimator.costs()
    assert costs.step_s == pytest.approx(1.0, rel=0.03)
    assert costs.persist_s == pytest.approx(20.0, rel=0.1)
    assert costs.slowdown == pytest.approx(0.1, abs=0.05)
    assert cluster.decision.interval_s == before.interval_s


def test_evaluations_change_nothing():
    """100 s every 50 steps, some in uploads: neither the step time nor the overhead moves."""
    plain, evaluating = settled(), Cluster()
    evaluating.paused_s = dict.fromkeys(range(50, 3000, 50), 100.0)
    for _ in range(40):
        evaluating.checkpoint()
    costs = evaluating.estimator.costs()
    assert costs.step_s == pytest.approx(1.0, rel=0.03)
    assert costs.slowdown == pytest.approx(plain.estimator.costs().slowdown, abs=0.05)
    assert evaluating.meter.measured().fraction == pytest.approx(
        evaluating.lost_s / evaluating.inside_s, abs=0.01
    )


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_new_step_time_is_followed_within_two_intervals(factor):
    """Threefold either way, and the interval in steps with it."""
    cluster = settled()
    steps = cluster.decision.interval_steps
    cluster.step_s *= factor
    cluster.checkpoint()
    cluster.checkpoint()
    assert cluster.estimator.costs().step_s == pytest.approx(factor, rel=0.1)
    assert cluster.decision.interval_steps == pytest.approx(steps / factor, rel=0.35)
    after = [cluster.decision.interval_s]
    for _ in range(10):
        cluster.checkpoint()
        after.append(cluster.decision.interval_s)
    assert len(set(after)) <= 2


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_new_bandwidth_is_followed_within_four_intervals(factor):
    """Tenfold either way; then the decision stays where it is."""
    cluster = settled()
    cluster.persist_s *= factor
    for _ in range(4):
        cluster.checkpoint()
    costs = cluster.estimator.costs()
    assert costs.persist_s == pytest.approx(cluster.persist_s, rel=0.05)
    assert costs.persist_tail_s == pytest.approx(cluster.persist_s, rel=0.05)
    decided = set()
    for _ in range(12):
        cluster.checkpoint()
        decided.add(cluster.decision.interval_s)
    assert len(decided) <= 2
    truth_s = cluster.stall_s + cluster.slowdown * cluster.persist_s
    assert cluster.estimator.costs().checkpoint_s == pytest.approx(truth_s, rel=0.3)


def test_a_slower_upload_lengthens_an_infeasible_interval_at_once():
    """The 95th percentile sees the first slow upload."""
    cluster = settled(num_gpus=1_000_000, slowdown=0.0, stall_s=0.1)
    assert cluster.decision.decided_by == "feasibility"
    cluster.checkpoint(persist_s=200.0)
    assert cluster.decision.period_s > 60.0


def test_resizes_are_followed_at_once():
    """8 to 1,024 and back: scaled costs first, measured ones later, no oscillation."""
    cluster = settled(num_gpus=8)
    small_s = cluster.decision.interval_s
    cluster.num_gpus = 1_024
    cluster.estimator.observe_resize(bytes_ratio=0.5)
    cluster.persist_s, cluster.stall_s = 10.0, 0.25
    cluster.decide()
    at_once_s = cluster.decision.interval_s
    assert at_once_s == pytest.approx(small_s * math.sqrt(8 / 1_024 / 2), rel=0.25)
    assert "1,024 GPUs instead of 8" in cluster.decision.reason
    for _ in range(10):
        cluster.checkpoint()
        assert cluster.decision.interval_s == at_once_s
    cluster.num_gpus = 8
    cluster.estimator.observe_resize(bytes_ratio=2.0)
    cluster.persist_s, cluster.stall_s = 20.0, 0.5
    cluster.decide()
    assert cluster.decision.interval_s == pytest.approx(small_s, rel=0.3)


def test_costs_follow_the_bytes_that_were_really_written():
    """A resize that was expected to halve the shards did not: the costs are put right at once."""
    estimator = CostEstimator()
    for _ in range(20):
        estimator.observe_step(1.0, overlapped=False)
    for _ in range(4):
        estimator.observe_checkpoint(stall_s=1.0, persist_s=20.0, bytes_per_rank=1e9)
    estimator.observe_resize(bytes_ratio=0.5)
    for _ in range(3):
        estimator.observe_step(1.0, overlapped=False)
    assert estimator.bytes_per_rank == 5e8
    assert estimator.costs().persist_s == pytest.approx(10.0)
    estimator.observe_checkpoint(stall_s=1.0, persist_s=20.0, bytes_per_rank=1e9)
    assert estimator.bytes_per_rank == 1e9
    assert estimator.costs().persist_s == pytest.approx(20.0)


def test_an_aborted_attempt_is_not_charged_to_the_next_checkpoint():
    """Slow steps without a commit are forgotten; the next checkpoint has its own."""
    cluster = settled()
    for _ in range(200):
        cluster.step(overlapped=True)
    for _ in range(10):
        cluster.step(overlapped=False)
    cluster.checkpoint()
    assert cluster.estimator.costs().slowdown == pytest.approx(0.1, abs=0.03)


def test_a_late_commit_still_finds_its_steps():
    """The message may come after the free steps that settle the run."""
    estimator = CostEstimator()
    for i in range(8):
        for _ in range(10):
            estimator.observe_step(1.25, overlapped=True)
        for j in range(20):
            estimator.observe_step(1.0, overlapped=False)
            if j == 12:
                estimator.observe_checkpoint(stall_s=0.1, persist_s=12.5)
        assert i == 0 or estimator.costs().slowdown == pytest.approx(0.2, abs=0.05)


def test_steps_that_are_never_free_still_give_a_step_time():
    """Uploads without a gap: an upper bound is better than nothing."""
    estimator = CostEstimator()
    for _ in range(30):
        estimator.observe_step(2.0, overlapped=True)
    estimator.observe_checkpoint(stall_s=0.1, persist_s=60.0)
    assert estimator.costs().step_s == 2.0


@given(st.floats(0, 1e6))
def test_the_first_checkpoint_comes_early(step_s):
    """Within a minute, or after one step where that takes longer."""
    after_s = first_checkpoint_after_s(step_s)
    assert step_s <= after_s <= max(60.0, step_s)
    assert after_s >= 10.0


def test_a_steady_window_forgets_little():
    """Alternating steps and rare outliers are no change; a change is found within eight steps."""
    window = StepWindow()
    for i in range(500):
        window.add(3.0 if i % 10 == 0 else 1.0)
    assert len(window) == 64
    assert window.median_s() == 1.0
    assert window.mean_s() == pytest.approx(1.2, abs=0.1)
    for _ in range(8):
        window.add(2.0)
    assert window.median_s() == 2.0


# The meter.


@pytest.mark.parametrize("slowdown", [0.0, 0.1, 0.5])
def test_the_overhead_is_what_was_lost(slowdown):
    """Against the books of the simulated job."""
    cluster = Cluster(slowdown=slowdown)
    for _ in range(30):
        cluster.checkpoint(num_free=40)
    measured = cluster.meter.measured()
    assert measured.stall_s == pytest.approx(15.0)
    assert measured.fraction == pytest.approx(cluster.lost_s / cluster.inside_s, abs=0.006)


def test_a_periodic_slow_step_is_not_ours():
    """Every tenth step takes twice as long, in uploads as outside."""
    meter = OverheadMeter()
    for i in range(3000):
        meter.observe_step(2.0 if i % 10 == 0 else 1.0, overlapped=i % 50 < 20)
    assert meter.measured().fraction < 0.01


def test_pauses_that_only_checkpoints_cause_are_ours():
    """A step of 10 s in every upload is counted; the same by chance is not."""
    ours, chance = OverheadMeter(), OverheadMeter()
    for i in range(5000):
        overlapped = i % 50 < 10
        ours.observe_step(10.0 if i % 50 == 3 else 1.0, overlapped=overlapped)
        chance.observe_step(10.0 if i % 37 == 3 else 1.0, overlapped=overlapped)
    assert ours.measured().fraction == pytest.approx(9 / 59, rel=0.05)
    assert chance.measured().fraction < 0.01


def test_a_change_of_step_time_is_not_overhead():
    """Steps become three times as long in the middle of an upload, once."""
    meter = OverheadMeter()
    for i in range(2000):
        meter.observe_step(1.0 if i < 1005 else 3.0, overlapped=i % 50 < 10)
    assert meter.measured().fraction < 0.005


def test_phases_are_told_apart():
    """The overhead of a phase is the difference of two readings."""
    meter = OverheadMeter()
    meter.observe_step(9.0, overlapped=False)
    for i in range(1000):
        meter.observe_step(1.0, overlapped=False, stall_s=0.5 if i % 100 == 0 else 0.0)
    first = meter.measured()
    for i in range(1000):
        meter.observe_step(1.0, overlapped=False, stall_s=0.5 if i % 10 == 0 else 0.0)
    assert first.fraction == pytest.approx(0.005)
    assert meter.measured().since(first).fraction == pytest.approx(0.05)
    assert MeasuredOverhead().fraction == 0.0


def test_memory_is_constant():
    """A hundred thousand steps leave nothing behind."""
    meter = OverheadMeter()

    def size():
        tracker = meter._steps
        return len(tracker.free) + len(tracker.overlapped) + sys.getsizeof(tracker._after_s)

    for i in range(2_000):
        meter.observe_step(1.0 + i % 7, overlapped=i % 100 < 30)
    before = size()
    for i in range(20_000):
        meter.observe_step(1.0 + i % 7, overlapped=i % 100 < 30)
    assert size() <= before + 200


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.booleans(), st.floats(0, 1e9)), max_size=60),
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), max_size=6),
)
def test_any_measurements_give_numbers(steps, checkpoints):
    """No order and no size of inputs leads to NaN or an error."""
    estimator, meter = CostEstimator(), OverheadMeter()
    waiting = list(checkpoints)
    for i, (duration_s, overlapped, stall_s) in enumerate(steps):
        estimator.observe_step(duration_s, overlapped=overlapped, stall_s=stall_s)
        meter.observe_step(duration_s, overlapped=overlapped, stall_s=stall_s)
        if i % 10 == 9 and waiting:
            stalled_s, persist_s = waiting.pop()
            estimator.observe_checkpoint(stall_s=stalled_s, persist_s=persist_s)
        costs = estimator.costs()
        if costs is not None:
            assert all(math.isfinite(value) for value in dataclasses.astuple(costs))
        assert 0 <= meter.measured().fraction < math.inf


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_measurements_are_named(bad):
    """Negative or not finite: refused by name, and nothing changes."""
    estimator, meter = CostEstimator(), OverheadMeter()
    for observer in (estimator, meter):
        with pytest.raises(ValueError, match="duration_s"):
            observer.observe_step(bad, overlapped=False)
        with pytest.raises(ValueError, match="stall_s"):
            observer.observe_step(1.0, overlapped=False, stall_s=bad)
    with pytest.raises(ValueError, match="stall_s"):
        estimator.observe_checkpoint(stall_s=bad, persist_s=1.0)
    with pytest.raises(ValueError, match="persist_s"):
        estimator.observe_checkpoint(stall_s=1.0, persist_s=bad)
    with pytest.raises(ValueError, match="seconds"):
        estimator.observe_restart(bad)
    with pytest.raises(ValueError, match="bytes_ratio"):
        estimator.observe_resize(bytes_ratio=bad)
