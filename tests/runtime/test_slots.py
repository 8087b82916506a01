"""Two snapshots in memory at a time."""

from hypothesis import given
from hypothesis import strategies as st

from raycheck.core.layout import Entry
from raycheck.core.lineage import GenerationId
from raycheck.core.restore import RestoreVote
from raycheck.runtime.generation import Generation
from raycheck.runtime.messages import MetricsTaken
from raycheck.runtime.slots import Slots


@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_plans_in_flight_have_slots_of_their_own(num_slots, doings):
    """As long as no more of them are in flight than there are slots, in whatever order they end."""
    slots, in_flight = Slots(num_slots), {}
    for plan_id, (is_begun, which) in enumerate(doings, 1):
        if is_begun and len(in_flight) < num_slots:
            slot = slots.take(plan_id)
            assert slot in range(num_slots)
            assert slot not in in_flight.values()
            in_flight[plan_id] = slot
        elif in_flight:
            ended = sorted(in_flight)[which % len(in_flight)]
            slots.free(ended)
            del in_flight[ended]


def test_where_none_is_free_the_oldest_plan_was_given_up():
    """A coordinator that is gone told nobody of its end."""
    slots = Slots(2)
    assert [slots.take(3), slots.take(4), slots.take(5), slots.take(6)] == [0, 1, 0, 1]
    slots.free_all()
    assert slots.take(7) == 0


def test_a_snapshot_keeps_the_layout_that_it_was_taken_with():
    """The next may have another before the first is committed, and messages may come twice."""
    generation = Generation(
        GenerationId(1, "aa"), 1, None, RestoreVote(world_size=1, candidates=(), is_exact=False)
    )
    old, new = ((Entry("a", "F32", (n,), (0,), (n,), -1, 0, 0, 4 * n),) for n in (1, 2))
    first, second = (MetricsTaken(0, plan_id, {"loss": float(plan_id)}, {"d": plan_id}) for plan_id in (1, 2))
    generation.tables[0] = old
    generation.take(first)
    generation.tables[0] = new
    generation.take(second)
    generation.take(first)
    assert generation.tables_of(1) == {0: old}
    assert generation.tables_of(2) == {0: new}
    assert (generation.accounts_of(1), generation.accounts_of(2)) == ({"d": 1}, {"d": 2})
    generation.forget(1)
    assert generation.tables_of(1) == {}
    assert generation.tables_of(2) == {0: new}
