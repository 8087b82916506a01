"""How fast steps go by, and what is at risk meanwhile."""

import pytest

from raycheck.config import Settings
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.pace import Pace
from raycheck.core.restore import RestoreVote
from raycheck.runtime.generation import Generation
from raycheck.runtime.tuner import Tuner


def seen(steps_per_s, seconds, *, every_s=0.1, begin_s=100.0):
    pace = Pace()
    for tick in range(int(seconds / every_s) + 1):
        pace.observe(int(tick * every_s * steps_per_s), begin_s + tick * every_s)
    return pace, begin_s + seconds


@pytest.mark.parametrize("steps_per_s", [0.01, 0.5, 3.0, 200.0])
def test_a_steady_pace_is_told_as_it_is(steps_per_s):
    """Of steps that take minutes as of those that take milliseconds."""
    pace, now_s = seen(steps_per_s, 600.0)
    assert pace.steps_per_s(now_s) == pytest.approx(steps_per_s, rel=0.07)


def test_it_follows_a_change_within_half_a_minute_and_forgets_the_rest():
    """What it keeps stays small."""
    pace, now_s = seen(10.0, 300.0)
    step = pace.step
    for tick in range(1, 400):
        pace.observe(step + tick, now_s + tick * 0.1 * 5)
    assert pace.steps_per_s(now_s + 399 * 0.5) == pytest.approx(2.0, rel=0.05)
    assert len(pace._seen) < 100


def test_it_falls_while_nothing_is_seen():
    """A step on its way is no sign of that, one that is late is."""
    pace, now_s = seen(10.0, 30.0)
    assert pace.steps_per_s(now_s + 0.1) == pytest.approx(10.0, rel=0.05)
    assert pace.steps_per_s(now_s + 30.0) == pytest.approx(5.0, rel=0.05)
    assert pace.steps_per_s(now_s + 3000.0) < 0.2


def test_before_two_steps_there_is_none():
    """And older or equal steps, which come again, change nothing."""
    pace = Pace()
    assert (pace.step, pace.step_seen_s, pace.steps_per_s(5.0)) == (None, None, None)
    for now_s, step in ((1.0, 7), (2.0, 7), (3.0, 6)):
        pace.observe(step, now_s)
    assert (pace.step, pace.step_seen_s, pace.steps_per_s(5.0)) == (7, 1.0, None)


def test_at_risk_is_what_was_trained_since_the_snapshot_that_counts():
    """Not since its commit; after a restore only what came after it. Warming up, a step may be left out."""
    tuner = Tuner(Settings())
    tuner.begin_generation(2)
    trained = [(0.5, 0.0, False)] * 20
    tuner.observe_steps(trained)
    assert tuner.at_risk_s == pytest.approx(10.0, abs=0.6)
    tuner.observe_checkpoint(stall_s=0.0, persist_s=3.0)
    assert tuner.at_risk_s == pytest.approx(3.0, abs=0.6)
    tuner.observe_steps(trained)
    assert tuner.at_risk_s == pytest.approx(13.0, abs=0.6)
    tuner.begin_generation(2)
    assert tuner.at_risk_s == 0.0
    tuner.observe_steps(trained)
    assert tuner.at_risk_s == pytest.approx(10.0, abs=0.6)


def test_a_restore_is_no_pace():
    """Ranks say step 0 until they have loaded, and then the restored one: no hundred steps in a moment."""
    run = GenerationId(2, "aaaaaaaa")
    generation = Generation(run, 1, None, RestoreVote(world_size=1, candidates=(), is_exact=False))
    generation.see_step(0, 100.0)
    generation.may_commit(CheckpointRef(480, GenerationId(1, "bbbbbbbb"), 7), Settings())
    generation.see_step(0, 101.0)
    for tick in range(50):
        generation.see_step(480 + tick, 103.0 + tick / 10)
    assert generation.pace.steps_per_s(108.0) == pytest.approx(10.0, rel=0.05)
