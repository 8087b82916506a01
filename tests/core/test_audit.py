"""The audit against a count of every single position."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycheck.core import audit
from raycheck.core.audit import Ledger, Stretch, decode_account, encode_account
from raycheck.core.cursor import Cursor, Dealing, Rest


class Trainer:
    """Walks through the data step by step and counts each position by hand."""

    def __init__(self, cursor, dealing):
        self.cursor, self.dealing = cursor, dealing
        self.ledger = Ledger(cursor)
        self.used = Counter()
        self.repeats = Counter()
        self.dropped = Counter()

    def step(self):
        """Take one step; in the next epoch, if this one is over."""
        if self.cursor.consumed == self.cursor.length:
            self.jump(self.cursor.epoch + 1, 0)
        rest = Rest(self.cursor, self.dealing)
        after = rest.after(min(1, rest.num_steps))
        for position in rest.span(0) if rest.num_steps else ():
            into = self.used if position < self.cursor.length else self.repeats
            into[self.cursor.epoch, position] += 1
        for position in range(rest.span(0).stop if rest.num_steps else self.cursor.consumed, after.consumed):
            self.dropped[self.cursor.epoch, position] += 1
        if not rest.num_steps:
            # All that is left is dropped: the loader goes on to the next epoch.
            self.dropped.update(
                (self.cursor.epoch, p) for p in range(self.cursor.consumed, self.cursor.length)
            )
            after = self.cursor.at(self.cursor.epoch, self.cursor.length)
        self.cursor = after

    def jump(self, epoch, consumed):
        to = self.cursor.at(epoch, consumed)
        self.ledger.move(self.cursor, to)
        self.cursor = to

    def account(self):
        return decode_account(through_json(encode_account(self.cursor, self.dealing, self.ledger)))


def through_json(value):
    return json.loads(json.dumps(value))


def stretch(number, account, world_size=1):
    accounts = None if account is None else {"loader": account}
    return Stretch(generation=f"g{number}", from_step=0, to_step=1, world_size=world_size, accounts=accounts)


def ranges(counts, epoch, wanted):
    """Return the positions of an epoch whose count is as wanted, as half-open ranges."""
    found = []
    for position in sorted(p for (e, p), count in counts.items() if e == epoch and wanted(count)):
        if found and found[-1][1] == position:
            found[-1] = found[-1][0], position + 1
        else:
            found.append((position, position + 1))
    return tuple(found)


dealings = st.builds(
    lambda world_size, items, remainder: Dealing(
        world_size=world_size, global_batch_size=world_size * items, remainder=remainder
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["exact", "pad", "drop"]),
)


@given(st.integers(1, 30), st.lists(st.tuples(dealings, st.integers(0, 12), st.integers(0, 5)), min_size=1))
@settings(max_examples=300)
def test_a_lineage_without_jumps_is_clean_whatever_was_lost(length, generations):
    """Stops, lost steps and resizes: each position once, repeats and dropped ones counted as such."""
    cursor, stretches, used, repeats, dropped = Cursor(length=length), [], Counter(), Counter(), Counter()
    for number, (dealing, num_steps, num_lost) in enumerate(generations):
        trainer = Trainer(cursor, dealing)
        for _ in range(num_steps):
            trainer.step()
        cursor = trainer.cursor
        stretches.append(stretch(number, trainer.account(), dealing.world_size))
        for into, counts in ((used, trainer.used), (repeats, trainer.repeats), (dropped, trainer.dropped)):
            into.update(counts)
        for _ in range(num_lost):
            trainer.step()
    (found,) = audit.audit(stretches)
    assert found.is_clean
    assert not found.unknown
    for epoch in found.epochs:
        assert epoch.num_repeats == sum(n for (e, _), n in repeats.items() if e == epoch.epoch)
        assert epoch.num_dropped == sum(n for (e, _), n in dropped.items() if e == epoch.epoch)
        covered = sum(piece.end - piece.begin for piece in epoch.pieces) - epoch.num_dropped
        assert covered == sum(n for (e, _), n in used.items() if e == epoch.epoch)
        assert epoch.expected == (cursor.consumed if epoch.epoch == cursor.epoch else length)


moves = st.one_of(
    st.tuples(st.just("step")), st.tuples(st.just("jump"), st.integers(0, 3), st.integers(0, 20))
)


@given(st.integers(1, 20), st.lists(st.lists(moves, max_size=12), min_size=1, max_size=4))
@settings(max_examples=300)
def test_what_was_consumed_twice_or_never_is_found_position_by_position(length, generations):
    """Jumps anywhere, also between generations: duplicates and gaps are those that a count finds."""
    used, stretches, cursor = Counter(), [], Cursor(length=length)
    for number, chosen in enumerate(generations):
        trainer = Trainer(cursor, Dealing(batch_size=3))
        for move in chosen:
            if move[0] == "step":
                trainer.step()
            else:
                trainer.jump(move[1], min(move[2], length))
        cursor = trainer.cursor
        used.update(trainer.used)
        stretches.append(stretch(number, trainer.account()))
    (found,) = audit.audit(stretches)
    for epoch in found.epochs:
        counts = {(epoch.epoch, p): used[epoch.epoch, p] for p in range(epoch.expected)}
        assert epoch.duplicates == ranges(counts, epoch.epoch, lambda count: count > 1)
        assert epoch.gaps == ranges(counts, epoch.epoch, lambda count: count == 0)
        if epoch.epoch != cursor.epoch:
            assert epoch.expected == length
    assert {e for e, _ in used} <= {epoch.epoch for epoch in found.epochs}


def test_a_skipped_epoch_is_a_gap_and_one_taken_again_is_double():
    """set_epoch forwards and backwards."""
    trainer = Trainer(Cursor(length=10), Dealing(batch_size=5))
    trainer.step()
    trainer.step()
    trainer.jump(2, 0)
    trainer.step()
    trainer.step()
    trainer.jump(0, 0)
    trainer.step()
    (found,) = audit.audit([stretch(0, trainer.account())])
    assert [(e.epoch, e.duplicates, e.gaps) for e in found.epochs] == [
        (0, ((0, 5),), ()),
        (1, (), ((0, 10),)),
        (2, (), ()),
    ]
    assert not found.is_clean


def test_what_is_not_known_is_said_and_not_guessed():
    """A generation without an account, other data, and too many jumps."""
    first = Trainer(Cursor(length=10), Dealing(batch_size=5))
    first.step()
    other = Trainer(Cursor(length=11), Dealing(batch_size=5))
    (found,) = audit.audit([stretch(0, first.account()), stretch(1, None), stretch(2, other.account())])
    assert len(found.unknown) == 2
    assert "g1" in found.unknown[0]
    assert "other data" in found.unknown[1]
    for _ in range(audit.MAX_RUNS + 2):
        first.jump(0, 0)
        first.step()
    (found,) = audit.audit([stretch(0, first.account())])
    assert "jumped more than" in found.unknown[0]


def test_a_million_epochs_are_one_run():
    """An account does not grow with the run; and a forged one does not take all memory."""
    trainer = Trainer(Cursor(length=6), Dealing(batch_size=3))
    for _ in range(2 * 500):
        trainer.step()
    assert trainer.account().runs == ((0, 0, 499, 6),)
    fields = encode_account(trainer.cursor, trainer.dealing, trainer.ledger)
    huge = decode_account({**fields, "runs": [[0, 0, 2**62, 6]]})
    (found,) = audit.audit([stretch(0, huge)])
    assert "epochs" in found.unknown[0]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"length": -1},
        {"length": "9"},
        {"runs": []},
        {"runs": [[0, 0, 0]]},
        {"runs": [[0, 0, 0, 11]]},
        {"runs": [[1, 0, 0, 0]]},
        {"runs": [[0, 0.5, 0, 1]]},
        {"runs": None},
        {"world_size": 0},
        {"remainder": "keep"},
    ],
)
def test_a_damaged_account_is_a_value_error(change):
    """And so is anything that is no account at all."""
    fields = encode_account(Cursor(length=10), Dealing(), Ledger(Cursor(length=10)))
    decode_account(fields)
    with pytest.raises(ValueError, match=r"."):
        decode_account({**fields, **change})
    for nothing in (None, 3, [], {}):
        with pytest.raises(ValueError, match=r"."):
            decode_account(nothing)
