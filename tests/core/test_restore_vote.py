"""All ranks restore one checkpoint, or none does."""

from hypothesis import given
from hypothesis import strategies as st

from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.restore import Offer, Proceed, Refuse, Reject, RestoreVote

A, B = (CheckpointRef(step, GenerationId(1, "aa"), 1) for step in (20, 10))


def vote(candidates=(A, B), *, is_exact=False):
    return RestoreVote(world_size=2, candidates=list(candidates), is_exact=is_exact)


def test_all_well():
    """Nobody proceeds before all have verified."""
    run = vote()
    assert run.ask(0) == [Offer((0,), A)]
    assert run.report(0, A, None) == []
    assert run.ask(1) == [Offer((1,), A)]
    assert run.report(1, A, None) == [Proceed(A)]
    assert run.ask(0) == [Proceed(A)], "a rank that asks again hears the same"


def test_one_bad_rank_takes_all_to_the_older_one():
    """B4, P2: the ranks that were well are asked again too."""
    run = vote()
    run.ask(0), run.ask(1)
    run.report(0, A, None)
    assert run.report(1, A, "corrupt") == [Reject(A, "corrupt"), Offer((0, 1), B)]
    assert run.report(0, A, None) == [], "a late word on the old offer does not count"
    assert run.report(0, B, None) == []
    assert run.report(1, B, None) == [Proceed(B)]


def test_nothing_to_restore_is_agreed_on_as_well():
    """A fresh run begins when every rank has said so."""
    run = vote(())
    assert run.ask(0) == [Offer((0,), None)]
    assert run.report(0, None, None) == []
    run.ask(1)
    assert run.report(1, None, None) == [Proceed(None)]


def test_a_run_whose_checkpoints_are_all_bad_does_not_start_at_zero():
    """B2: it stops and says how to start afresh."""
    run = vote([A])
    run.ask(0), run.ask(1)
    _, refuse = run.report(0, A, "corrupt")
    assert isinstance(refuse, Refuse)
    assert 'resume="fresh"' in refuse.message


def test_an_exact_step_has_no_fall_back():
    """The user named it."""
    run = vote(is_exact=True)
    run.ask(0), run.ask(1)
    _, refuse = run.report(0, A, "corrupt")
    assert "step 20 was asked for" in refuse.message


def test_another_models_checkpoint_is_not_fallen_back_from():
    """An older one would not fit either."""
    run = vote()
    run.ask(0), run.ask(1)
    assert run.report(0, A, "shape", is_mismatch=True) == [Refuse("shape", True)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=40))
def test_proceed_means_that_every_rank_said_so(words):
    """Whatever order and repetition, one end, and only with all ranks' word on that very offer."""
    refs = [CheckpointRef(step, GenerationId(1, "aa"), 1) for step in (30, 20, 10)]
    run = RestoreVote(world_size=3, candidates=refs, is_exact=False)
    well: dict[object, set[int]] = {}
    ends = set()
    for rank, which, is_well in words:
        if which == 3:
            actions = run.ask(rank)
        else:
            if is_well:
                well.setdefault(refs[which], set()).add(rank)
            actions = run.report(rank, refs[which], None if is_well else "bad")
        for action in actions:
            if isinstance(action, Proceed):
                ends.add(action.ref)
                assert well[action.ref] == {0, 1, 2}
    assert len(ends) <= 1
