"""The shell around the interval policy."""

import pytest

from raycheck.config import Settings
from raycheck.runtime.tuner import Tuner, given_rate


def trained(tuner, seconds, step_s=0.1):
    for _ in range(int(seconds / step_s)):
        tuner.observe_steps([(step_s, 0.0, False)])


def test_a_fleets_rate_may_be_a_number_a_file_or_a_function(tmp_path, caplog):
    """What cannot be asked is a warning and not the end of a run."""
    path = tmp_path / "rate"
    path.write_text("315\n")
    assert [given_rate(given) for given in (12.5, str(path), lambda: 42.0)] == [12.5, 315.0, 42.0]
    for bad in (str(tmp_path / "nothing"), lambda: -1.0, lambda: 1 / 0):
        assert given_rate(bad, otherwise=7.0) == 7.0
    assert len(caplog.records) == 3


def test_a_files_rate_is_asked_anew_at_each_start(tmp_path):
    """A worse fleet makes the next generation checkpoint more often."""
    path = tmp_path / "rate"
    path.write_text("100000")
    tuner = Tuner(Settings(gpu_days_per_failure=str(path)))
    tuner.begin_generation(64)
    trained(tuner, 20)
    tuner.observe_checkpoint(stall_s=0.01, persist_s=2.0)
    calm_s = tuner.interval_s
    path.write_text("0.5")
    tuner.begin_generation(64)
    assert tuner.interval_s < calm_s / 2


def test_a_resize_changes_the_interval_at_once_and_says_why():
    """Eight times the GPUs fail eight times as often; one sentence for people."""
    tuner = Tuner(Settings())
    tuner.begin_generation(128)
    trained(tuner, 20)
    tuner.observe_checkpoint(stall_s=2.0, persist_s=10.0)
    before_s = tuner.interval_s
    tuner.take_changes()
    tuner.begin_generation(1024)
    (change,) = tuner.take_changes()
    assert tuner.interval_s < before_s / 1.5
    assert "1,024" in change
    assert "128" in change


def test_before_anything_is_known_the_first_checkpoint_is_early():
    """Exposure is bounded while nothing is known; the user's limits hold for it too."""
    tuner = Tuner(Settings())
    assert tuner.interval_s is None
    trained(tuner, 1)
    assert tuner.interval_s == pytest.approx(10.0)
    tuner = Tuner(Settings(recovery_point_s=3.0))
    trained(tuner, 1)
    assert tuner.interval_s == 3.0


def test_failures_shorten_the_interval():
    """Restarts of this run are evidence."""
    tuner = Tuner(Settings())
    tuner.begin_generation(8)
    trained(tuner, 20)
    tuner.observe_checkpoint(stall_s=0.5, persist_s=2.0)
    before_s = tuner.interval_s
    for _ in range(5):
        tuner.observe_failure("worker")
    tuner.begin_generation(8)
    assert tuner.interval_s < before_s / 2
    short_s = tuner.interval_s
    tuner.observe_failure("preempted")
    tuner.begin_generation(8)
    assert tuner.interval_s == short_s, "a preemption that left time to save loses no work"


def test_rare_dear_checkpoints_are_paid_for_until_the_bound_holds_as_measured():
    """Estimates forget outliers, the bound does not: every eighth checkpoint costs fifty times the others."""
    tuner = Tuner(Settings(recovery_point_s=0.2, gpu_days_per_failure=0.1))
    now_s = last_s = 0.0
    num_checkpoints = 0
    for _ in range(20_000):
        stall_s = 0.0
        if tuner.interval_s is not None and now_s - last_s >= tuner.interval_s:
            num_checkpoints += 1
            stall_s = 1.0 if num_checkpoints % 8 == 0 else 0.02
            last_s = now_s
        now_s += 0.1 + stall_s
        tuner.observe_steps([(0.1 + stall_s, stall_s, False)])
        if stall_s:
            tuner.observe_checkpoint(stall_s=stall_s, persist_s=0.01)
    assert num_checkpoints > 100
    assert 0.03 < tuner.overhead <= 0.036


def test_paying_back_never_stops_a_run_from_checkpointing():
    """What looks like cost for ever lengthens the interval by a factor and not without end."""
    tuner = Tuner(Settings())
    trained(tuner, 20)
    tuner.observe_checkpoint(stall_s=0.5, persist_s=1.0)
    tuner.observe_steps([(1.0, 0.9, False)] * 500)
    assert tuner.interval_s <= 10 * tuner.decision.period_s
