"""Which generations and checkpoints count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core import lineage
from raycheck.core.lineage import (
    Ancestor,
    CheckpointRef,
    GenerationId,
    GenerationRecord,
    record_for,
    selectable,
)
from raycheck.core.retention import to_delete
from raycheck.errors import CheckpointNotFoundError

G1, G2, G3, G4 = (GenerationId(n, f"a{n}") for n in range(1, 5))


def ref(step, generation, plan_id=1):
    return CheckpointRef(step, generation, plan_id)


def test_only_the_chain_counts_up_to_where_it_was_left():
    """A late manifest of an old generation, above the step where it was left, is nobody's."""
    first = record_for(G1, world_size=2, parent=None, tip_record=None)
    second = record_for(G2, world_size=2, parent=ref(20, G1), tip_record=first)
    refs = [ref(10, G1), ref(20, G1), ref(30, G1), ref(25, G2), ref(40, G2), ref(99, G3)]
    assert selectable(second, refs) == [ref(40, G2), ref(25, G2), ref(20, G1), ref(10, G1)]


def test_a_roll_back_below_an_ancestor_cuts_it_too():
    """resume=10 leaves behind everything after step 10, whoever wrote it."""
    first = record_for(G1, world_size=1, parent=None, tip_record=None)
    second = record_for(G2, world_size=1, parent=ref(20, G1), tip_record=first)
    third = record_for(G3, world_size=1, parent=ref(10, G1), tip_record=second)
    assert third.chain == (Ancestor(G1, 10),)
    assert selectable(third, [ref(20, G1), ref(10, G1), ref(30, G2)]) == [ref(10, G1)]


def test_a_fresh_start_leaves_everything_behind():
    """Its record has no chain."""
    assert selectable(record_for(G2, world_size=1, parent=None, tip_record=None), [ref(10, G1)]) == []


def test_of_two_that_start_at_once_one_is_the_tip_and_fences_the_other():
    """Equal numbers are ordered by id, the same way for everyone."""
    one, other = GenerationId(2, "aa"), GenerationId(2, "bb")
    records = [record_for(g, world_size=1, parent=None, tip_record=None) for g in (other, one)]
    assert lineage.tip(records).generation == other
    assert lineage.newer_claim(one, [one, other]) == other
    assert lineage.newer_claim(other, [one, other]) is None


def test_steps_are_numbers_not_text():
    """B5: 10000 is newer than 9900."""
    record = record_for(G1, world_size=1, parent=None, tip_record=None)
    steps = [9, 10, 99, 100, 9900, 10000, 1_000_000]
    assert [r.step for r in selectable(record, [ref(s, G1) for s in steps])] == sorted(steps, reverse=True)
    assert [r.step for r in to_delete([ref(s, G1) for s in steps], keep_last=2)] == [9, 10, 99, 100, 9900]


def test_a_step_that_does_not_exist_is_an_error_that_lists_those_that_do():
    """B3: never training from random weights without a word."""
    refs = [ref(20, G1), ref(10, G1)]
    with pytest.raises(CheckpointNotFoundError, match="available steps: 10, 20") as error:
        lineage.candidates(77, refs)
    assert error.value.available == [10, 20]
    assert lineage.candidates(10, refs) == [ref(10, G1)]
    assert lineage.candidates("auto", refs) == refs
    assert lineage.candidates("fresh", refs) == []
    assert lineage.candidates("auto", []) == []


@given(st.data())
def test_records_survive_the_store(data):
    """to_dict and from_dict are inverse, over chains of resumes and roll-backs."""
    record, committed = None, []
    for number in range(1, data.draw(st.integers(1, 6)) + 1):
        generation = GenerationId(number, f"{number:08x}")
        usable = selectable(record, committed)
        parent = data.draw(st.sampled_from([None, *usable]))
        record = record_for(generation, world_size=number, parent=parent, tip_record=record)
        start = parent.step if parent else 0
        committed += [ref(start + s, generation, s) for s in range(1, data.draw(st.integers(0, 4)) + 1)]
        assert GenerationRecord.from_dict(record.to_dict()) == record
        newest = selectable(record, committed)
        assert parent is None or parent in newest, "what was restored still counts"
        assert all(r.step <= start for r in newest if r.generation != generation)


@pytest.mark.parametrize(
    "fields",
    [{}, {"generation": [1, "../x"], "parent": None, "chain": [], "world_size": 1}, {"generation": 3}, []],
)
def test_a_damaged_record_is_refused(fields):
    """Malformed fields raise ValueError and nothing else."""
    with pytest.raises(ValueError, match="not a"):
        GenerationRecord.from_dict(fields)


def test_retention_never_deletes_the_last_or_a_protected_one():
    """At least one stays; protected ones stay beside those that are kept."""
    refs = [ref(s, G1) for s in (1, 2, 3, 4)]
    assert to_delete(refs, keep_last=1) == refs[:3]
    assert to_delete(refs, keep_last=1, protected=[refs[0]]) == refs[1:3]
    assert to_delete([], keep_last=1) == []
    with pytest.raises(ValueError, match="keep_last"):
        to_delete(refs, keep_last=0)
