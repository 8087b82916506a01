"""Which checkpoints stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.retention import to_delete

G = GenerationId(1, "ab")


def ref(step):
    return CheckpointRef(step, G, step)


def steps(refs):
    return [r.step for r in refs]


def test_the_newest_stay():
    """keep_last counts from the newest."""
    assert steps(to_delete(map(ref, range(10, 60, 10)), keep_last=2)) == [10, 20, 30]
    with pytest.raises(ValueError, match="keep_last=0"):
        to_delete([ref(1)], keep_last=0)


def test_one_of_each_period_of_steps_stays():
    """The first at or after each multiple; what lies before the first multiple is no milestone."""
    old = to_delete(map(ref, [30, 60, 90, 110, 140, 210, 260, 290]), keep_last=1, keep_every_steps=100)
    assert steps(old) == [30, 60, 90, 140, 260]


def test_one_of_each_period_of_time_stays():
    """What was committed when is not known of all: those stay."""
    refs = [ref(n) for n in range(1, 7)]
    times = {r: 1000.0 + 25 * r.step for r in refs[1:]}
    old = to_delete(refs, keep_last=1, keep_every_s=50.0, created_unix_s=times)
    # 1: unknown; 2, 4, 6: the first after 1050, 1100, 1150.
    assert steps(old) == [3, 5]


def test_the_protected_stay():
    """Registered ones, and those that are being read."""
    assert steps(to_delete(map(ref, [1, 2, 3]), keep_last=1, protected=[ref(1)])) == [2]


@given(
    st.sets(st.integers(0, 400), min_size=1, max_size=40),
    st.integers(1, 4),
    st.none() | st.integers(1, 50),
    st.none() | st.floats(0.5, 90),
)
def test_retention_needs_no_memory(all_steps, keep_last, keep_every_steps, keep_every_s):
    """Deleting after every checkpoint leaves what deleting once at the end leaves; the newest is there."""
    settings = {"keep_last": keep_last, "keep_every_steps": keep_every_steps, "keep_every_s": keep_every_s}
    refs = [ref(step) for step in sorted(all_steps)]
    times = {r: 1e9 + 3 * r.step for r in refs}
    at_end = set(refs) - set(to_delete(refs, created_unix_s=times, **settings))
    present = set()
    for r in refs:
        present.add(r)
        present -= set(to_delete(present, created_unix_s=times, **settings))
    assert present == at_end
    assert set(refs[-keep_last:]) <= present
