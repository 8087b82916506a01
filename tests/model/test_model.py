"""Nothing incomplete is selected and nothing acknowledged is lost, whatever order things happen in."""

from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raycheck.store.run
from tests.model.world import NAMES, World

NUM_STEPS = 800


@pytest.fixture(autouse=True, scope="module")
def _names():
    patch = pytest.MonkeyPatch()
    patch.setattr(raycheck.store.run, "secrets", NAMES)
    yield
    patch.undo()


def play(choose, **options) -> World:
    world = World(choose, **options)
    try:
        for _ in range(NUM_STEPS):
            if not world.step():
                break
        world.finish()
    except AssertionError as error:
        error.add_note("\n".join(world.trace[-60:]))
        raise
    return world


def test_the_undisturbed_course_commits():
    """The model does what it models: without faults one generation trains, commits and rotates."""
    world = play(lambda n: 0)
    assert world.acks
    assert not world.num_faults


@pytest.mark.parametrize("keep_last", [1, 2])
@pytest.mark.parametrize("may_roll_back", [False, True])
def test_no_interleaving_breaks_a_promise(keep_last, may_roll_back):
    """Hundreds of courses of several generations, coordinators and late calls; every kind of fault occurs."""
    faults, num_acks = collections.Counter(), 0
    for seed in range(300):
        rng = random.Random(seed)
        world = play(
            rng.randrange,
            keep_last=keep_last,
            may_roll_back=may_roll_back,
            max_generations=rng.choice([2, 4, 6]),
            fault_share=rng.choice([10, 40, 200]),
            call_fault_share=rng.choice([6, 20, 100]),
            max_in_flight=1 + seed % 2,
        )
        faults.update(world.num_faults)
        num_acks += len(world.acks)
    assert num_acks > 400
    kinds = ["put: reply lost", "put: failed, done later", "put: arrived late", "children: failed"]
    kinds += ["delete: failed", "group killed", "coordinator replaced", "message repeated"]
    assert all(faults[kind] for kind in kinds), faults


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=NUM_STEPS))
def test_no_short_course_breaks_a_promise(numbers):
    """The same, led by hypothesis, which shrinks what it finds."""
    left = iter(numbers)
    play(lambda n: next(left, 0) % n)
