"""Positions in the data: who gets what, at any world size, after any interruption."""

import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycheck.core.cursor import (
    TABLE_MAX_ITEMS,
    Cursor,
    Dealing,
    Rest,
    batch_seed,
    check_same_data,
    count_repeats,
    decode_cursor,
    describe_batch_change,
    encode_cursor,
    order_of,
)
from raycheck.errors import CheckpointMismatchError, ConfigError

PINNED_LONG = [1032, 2306, 3843, 4064, 2984]
PINNED_SHORT = [40, 14, 10, 39, 43]
LENGTHS = st.one_of(st.integers(0, 60), st.sampled_from([97, 503, 10**9 + 7, 10**12, 2**62 + 1]))


@st.composite
def dealings(draw):
    world_size = draw(st.integers(1, 9))
    remainder = draw(st.sampled_from(["exact", "drop", "pad"]))
    if draw(st.booleans()):
        global_batch_size = draw(st.integers(world_size, 4 * world_size))
        return Dealing(world_size=world_size, global_batch_size=global_batch_size, remainder=remainder)
    return Dealing(world_size=world_size, batch_size=draw(st.integers(1, 6)), remainder=remainder)


def sizes_of(rest: Rest) -> list[int]:
    return [len(rest.span(step)) for step in range(rest.num_steps)]


def check_rest(rest: Rest) -> None:
    """What every plan must keep, checked position by position."""
    world_size = rest.dealing.world_size
    seen = []
    for step in range(rest.num_steps):
        parts = [rest.positions(step, rank) for rank in range(world_size)]
        assert all(1 <= len(part) <= rest.dealing.rank_items for part in parts)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        seen += sorted(itertools.chain(*parts))
    begin = rest.cursor.consumed
    assert seen == list(range(begin, begin + rest.num_planned))
    assert rest.num_repeats == sum(position >= rest.cursor.length for position in seen)
    assert rest.num_dropped == rest.cursor.length - begin - len(seen) + rest.num_repeats


def design_sizes(num_items: int, world_size: int, batch_size: int) -> list[int]:
    """Sizes of steps as the rule is stated in words; repeats make up a step of W."""
    full = world_size * batch_size
    num_full, left = divmod(num_items, full)
    if left == 0:
        return [full] * num_full
    if left >= world_size:
        return [full] * num_full + [left]
    if num_full and batch_size > 1:
        return [full] * (num_full - 1) + [world_size * (batch_size - 1) + left, world_size]
    return [full] * num_full + [world_size]


def test_exact_is_the_stated_rule():
    """All small cases: the closed form gives the steps that the rule names."""
    for length, world_size, batch_size in itertools.product(range(41), range(1, 8), range(1, 6)):
        rest = Rest(Cursor(length=length), Dealing(world_size=world_size, batch_size=batch_size))
        assert sizes_of(rest) == design_sizes(length, world_size, batch_size), (
            length,
            world_size,
            batch_size,
        )
        check_rest(rest)


def test_exact_pads_only_where_no_sizes_add_up():
    """All small cases of a global batch: repeats if and only if no steps of W to G items exist."""
    for length, world_size in itertools.product(range(31), range(1, 7)):
        for full in range(world_size, 3 * world_size + 1):
            rest = Rest(Cursor(length=length), Dealing(world_size=world_size, global_batch_size=full))
            possible = any(t * world_size <= length <= t * full for t in range(length + 1))
            assert (rest.num_repeats == 0) == possible
            assert rest.num_steps == -(-length // full)
            assert rest.num_repeats < world_size
            check_rest(rest)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_drop_and_pad_have_full_steps_only(remainder):
    """All small cases: every step is full, one remainder is left out or filled up."""
    for length, world_size, batch_size in itertools.product(range(31), range(1, 6), range(1, 5)):
        dealing = Dealing(world_size=world_size, batch_size=batch_size, remainder=remainder)
        rest = Rest(Cursor(length=length), dealing)
        assert set(sizes_of(rest)) <= {dealing.step_items}
        assert rest.num_dropped == (length % dealing.step_items if remainder == "drop" else 0)
        check_rest(rest)


def test_a_rest_cut_anew_has_the_boundaries_it_had():
    """All small cases: resuming at any step gives the steps that would have followed."""
    for length, world_size in itertools.product(range(31), range(1, 6)):
        for full, remainder, may_split in itertools.product(
            range(world_size, 3 * world_size + 1), ["exact", "drop", "pad"], [True, False]
        ):
            dealing = Dealing(
                world_size=world_size, global_batch_size=full, remainder=remainder, may_split=may_split
            )
            rest = Rest(Cursor(length=length), dealing)
            spans = [rest.span(step) for step in range(rest.num_steps)]
            for num_done in range(rest.num_steps + 1):
                again = Rest(rest.after(num_done), dealing)
                if num_done == rest.num_steps and num_done:
                    assert again.num_steps == 0
                else:
                    assert [again.span(step) for step in range(again.num_steps)] == spans[num_done:]


def test_without_splitting_only_the_last_step_is_not_full():
    """What a plain loader's batches allow: full steps, then one of W items or more."""
    for length, world_size, batch_size in itertools.product(range(31), range(1, 6), range(1, 5)):
        dealing = Dealing(world_size=world_size, batch_size=batch_size, may_split=False)
        rest = Rest(Cursor(length=length), dealing)
        assert set(sizes_of(rest)[:-1]) <= {dealing.step_items}
        check_rest(rest)


@settings(max_examples=200)
@given(LENGTHS, st.lists(st.tuples(dealings(), st.integers(0, 1000)), max_size=6))
def test_any_chain_of_stops_and_resizes_consumes_each_position_once(length, chain):
    """Stop anywhere, resume with other ranks and batches: the spans lie end to end over the epoch."""
    cursor = Cursor(length=length)
    for dealing, thousandths in [*chain, (Dealing(world_size=2, batch_size=3), 1000)]:
        rest = Rest(cursor, dealing)
        num_steps = rest.num_steps * thousandths // 1000
        if num_steps:
            assert rest.span(0).start == cursor.consumed
            end = rest.span(num_steps - 1).stop
            cursor = rest.after(num_steps)
            assert cursor.consumed == (length if num_steps == rest.num_steps else end)
            assert rest.num_repeats == 0 or end <= length or num_steps == rest.num_steps
    assert cursor.consumed == length


@settings(max_examples=200)
@given(LENGTHS, dealings(), st.data())
def test_a_step_far_out_keeps_the_rules(length, dealing, data):
    """Any step of any length: contiguous, 1 to B per rank, repeats at the very end only."""
    rest = Rest(Cursor(length=length), dealing)
    if not rest.num_steps:
        return
    step = data.draw(st.integers(0, rest.num_steps - 1))
    parts = [rest.positions(step, rank) for rank in range(dealing.world_size)]
    assert sorted(itertools.chain(*parts)) == list(rest.span(step))
    assert all(1 <= len(part) <= dealing.rank_items for part in parts)
    assert rest.span(step).stop <= length or step == rest.num_steps - 1
    assert rest.span(step).start == (rest.span(step - 1).stop if step else 0)
    for part in parts:
        assert count_repeats(part, length) == sum(position >= length for position in part)


@given(st.integers(0, 300), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_constant_global_batch_cuts_alike_at_any_world_size(length, batch, first, second, data):
    """Full steps cover the same positions whatever the world size, before and after a resize."""
    full = batch * math.lcm(first, second)
    one = Rest(Cursor(length=length), Dealing(world_size=first, global_batch_size=full))
    num_done = data.draw(st.integers(0, max(0, length // full - 1)))
    two = Rest(one.after(num_done), Dealing(world_size=second, global_batch_size=full))
    for step in range(length // full - num_done - 1):
        assert two.span(step) == one.span(num_done + step)


def test_drop_leaves_out_the_same_items_with_a_constant_global_batch():
    """Stopped anywhere and resumed at another world size, the same last items are dropped."""
    for num_done, world_size in itertools.product(range(16), range(1, 9)):
        first = Rest(Cursor(length=503), Dealing(world_size=4, global_batch_size=32, remainder="drop"))
        dealing = Dealing(world_size=world_size, global_batch_size=32, remainder="drop")
        rest = Rest(first.after(num_done), dealing)
        assert rest.num_steps == (15 - num_done)
        if rest.num_steps:
            assert rest.span(rest.num_steps - 1).stop == 480
            assert rest.num_dropped == 23


def test_an_epoch_that_dropped_is_finished_for_any_world_size():
    """After the last step of a "drop" epoch no smaller world size finds another step."""
    rest = Rest(Cursor(length=503), Dealing(world_size=4, batch_size=8, remainder="drop"))
    assert Rest(rest.after(rest.num_steps), Dealing()).num_steps == 0


@pytest.mark.parametrize("length", [*range(1, 40), 97, 1024, 1025, 1089, 3001, 4096])
@pytest.mark.parametrize("seed", [0, -5, 2**80])
def test_an_order_is_a_bijection(length, seed):
    """Every item stands at one position."""
    order = order_of(Cursor(length=length, shuffle=True, seed=seed, epoch=3))
    assert sorted(map(order.item, range(length))) == list(range(length))


@given(st.sampled_from([TABLE_MAX_ITEMS + 1, 10**6, 10**12, 10**12 + 39, 2**62]), st.data())
def test_a_long_order_does_not_collide(length, data):
    """Distinct positions of a huge epoch hold distinct items, all inside it."""
    order = order_of(Cursor(length=length, shuffle=True, seed=data.draw(st.integers(0, 9))))
    positions = data.draw(st.sets(st.integers(0, length - 1), max_size=50))
    items = {order.item(position) for position in positions}
    assert len(items) == len(positions)
    assert all(0 <= item < length for item in items)


def test_an_order_depends_on_seed_epoch_and_length_alone():
    """The same in every process; other for another seed, epoch or length; identity unshuffled."""

    def first(**changes):
        cursor = Cursor(**{"length": 5000, "shuffle": True, "seed": 1, "epoch": 2} | changes)
        return [order_of(cursor).item(position) for position in range(20)]

    # Written down so that no later version reorders a checkpoint's epoch.
    assert first()[:5] == PINNED_LONG
    assert first(length=50)[:5] == PINNED_SHORT
    assert first(consumed=77) == first()
    assert len({tuple(first(**c)) for c in ({}, {"seed": 2}, {"epoch": 3}, {"length": 5001})}) == 4
    assert first(shuffle=False) == list(range(20))


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_small_orders_reach_all_permutations_evenly(length):
    """Over many epochs every permutation comes up about equally often (chi-square, 5 sigma)."""
    kinds, each = math.factorial(length), 60
    counts = Counter(
        tuple(map(order_of(Cursor(length=length, shuffle=True, epoch=epoch)).item, range(length)))
        for epoch in range(kinds * each)
    )
    assert len(counts) == kinds
    chi_square = sum((count - each) ** 2 / each for count in counts.values())
    assert abs(chi_square - (kinds - 1)) < 5 * math.sqrt(2 * (kinds - 1))


@pytest.mark.parametrize("length", [16, 1500])
def test_an_order_looks_random(length):
    """Mean item of a position, fixed points and distance of neighbours are those of a random permutation."""
    num_epochs = 400
    at_five, fixed, steps = 0, 0, 0
    for epoch in range(num_epochs):
        order = order_of(Cursor(length=length, shuffle=True, epoch=epoch))
        items = [order.item(position) for position in range(16)]
        at_five += items[5]
        fixed += sum(item == position for position, item in enumerate(items))
        steps += sum(abs(a - b) for a, b in itertools.pairwise(items)) / 15
    sigma = length / math.sqrt(12 * num_epochs)
    assert abs(at_five / num_epochs - (length - 1) / 2) < 5 * sigma
    assert abs(fixed - num_epochs * 16 / length) < 5 * math.sqrt(num_epochs * 16 / length)
    assert abs(steps / num_epochs - (length + 1) / 3) < 5 * sigma


def test_neighbours_in_a_long_order_are_independent():
    """Items at adjacent positions fill a 4 by 4 table evenly (chi-square, 5 sigma)."""
    length, each = 10**12, 500
    order = order_of(Cursor(length=length, shuffle=True, seed=4))
    items = [order.item(position) * 4 // length for position in range(16 * each * 2)]
    counts = Counter(zip(items[::2], items[1::2], strict=True))
    chi_square = sum((counts[cell] - each) ** 2 / each for cell in itertools.product(range(4), repeat=2))
    assert chi_square < 15 + 5 * math.sqrt(30)


def test_batch_seeds_differ():
    """Other seeds for other positions, epochs and runs."""
    seeds = {batch_seed(s, e, p) for s in range(10) for e in range(10) for p in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**64 for seed in seeds)


@given(LENGTHS, dealings(), st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.booleans(), st.data())
def test_a_cursor_survives_json(length, dealing, seed, epoch, shuffle, data):
    """Written and read through JSON, position and batch sizes are what they were."""
    consumed = data.draw(st.integers(0, length))
    cursor = Cursor(length=length, seed=seed, epoch=epoch, shuffle=shuffle, consumed=consumed)
    state = json.loads(json.dumps(encode_cursor(cursor, dealing)))
    assert state["format"] == 1
    saved, saved_dealing = decode_cursor(state)
    assert saved == cursor
    assert saved_dealing.step_items == dealing.step_items
    assert describe_batch_change(saved_dealing, dealing) is None
    check_same_data(saved, cursor.at(0))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"consumed": -1},
        {"consumed": 11},
        {"epoch": "1"},
        {"shuffle": 1},
        {"world_size": 0},
        {"length": True},
    ],
)
def test_a_state_that_makes_no_sense_is_refused(change):
    """Nothing but a whole cursor is taken for one."""
    state = encode_cursor(Cursor(length=10), Dealing())
    with pytest.raises(CheckpointMismatchError):
        decode_cursor({**state, **change})


def test_a_state_that_lacks_a_part_or_is_none_is_refused():
    """So is another loader's state."""
    state = encode_cursor(Cursor(length=10), Dealing())
    for name in state:
        with pytest.raises(CheckpointMismatchError):
            decode_cursor({key: value for key, value in state.items() if key != name})
    with pytest.raises(CheckpointMismatchError, match="list"):
        decode_cursor([])


@pytest.mark.parametrize(("field", "value"), [("length", 900), ("seed", 8), ("shuffle", False)])
def test_other_data_is_refused_by_both_values(field, value):
    """The error says what was saved, what was given, and what to do."""
    saved = Cursor(length=1000, seed=7, shuffle=True, epoch=2, consumed=300)
    given_now = Cursor(**{"length": 1000, "seed": 7, "shuffle": True, field: value})
    with pytest.raises(CheckpointMismatchError) as caught:
        check_same_data(saved, given_now)
    assert (caught.value.field, caught.value.given) == (field, value)
    assert repr(getattr(saved, field)) in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "set_epoch(3)" in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "given_now", "warns"),
    [
        (Dealing(world_size=4, batch_size=8), Dealing(world_size=2, batch_size=8), False),
        (Dealing(world_size=4, batch_size=8), Dealing(world_size=4, batch_size=9), True),
        (Dealing(world_size=4, batch_size=8), Dealing(world_size=2, batch_size=16), False),
        (Dealing(world_size=4, batch_size=8), Dealing(world_size=2, global_batch_size=32), False),
        (Dealing(world_size=4, global_batch_size=32), Dealing(world_size=2, global_batch_size=32), False),
        (Dealing(world_size=4, global_batch_size=32), Dealing(world_size=4, global_batch_size=31), True),
        (Dealing(world_size=4, global_batch_size=32), Dealing(world_size=2, batch_size=8), True),
    ],
)
def test_a_changed_batch_size_is_told_apart_from_a_resize(saved, given_now, warns):
    """Another world size alone is no change of the batch size."""
    text = describe_batch_change(saved, given_now)
    assert (text is not None) == warns


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("world_size", {"world_size": 0}),
        ("batch_size", {"batch_size": 0}),
        ("batch_size", {"batch_size": 2.0}),
        ("batch_size", {"batch_size": True}),
        ("batch_size", {"batch_size": 4, "global_batch_size": 8}),
        ("global_batch_size", {"global_batch_size": 3, "world_size": 4}),
        ("remainder", {"remainder": "keep"}),
    ],
)
def test_a_wrong_setting_is_named(field, arguments):
    """The error carries the field and its value."""
    with pytest.raises(ConfigError) as caught:
        Dealing(**arguments)
    assert caught.value.field == field
    assert f"{field}={arguments[field]!r}" in str(caught.value)


def test_there_is_no_step_outside():
    """Asking for one is an error, not an empty batch."""
    rest = Rest(Cursor(length=10), Dealing(batch_size=4))
    for call in (lambda: rest.span(3), lambda: rest.span(-1), lambda: rest.after(4), lambda: rest.after(-1)):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(IndexError):
        order_of(Cursor(length=0)).item(0)
