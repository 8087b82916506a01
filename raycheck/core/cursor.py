"""Where training is in its data, and who gets what next: arithmetic on positions.

An epoch has an *order*, a permutation of the items that depends on seed, epoch
and length alone. Training walks along it in steps. A step covers one span of
*positions*, the same for any world size as long as the global batch is the
same, and rank r of W takes every W-th position of the span, starting at the
r-th. A *cursor* is the position reached; what lies behind it was consumed, and
what lies ahead is dealt to whatever ranks there are now. Nothing here depends
on how far the cursor is: resuming in the middle of 10^12 items costs what
starting does.

**Sizes of steps.** Let n items remain, W ranks, at most G items per step. With
``remainder="exact"`` every step takes as many items as it may, at most G, that
leave one item per rank for each later step. For r = n mod G this gives: nothing
special for r = 0; one smaller step for r >= W; and for r < W two steps of
G - W + r and W items in place of one of G (with a small G, more than two).
Where no steps of W to G items add up to n (G = W, or n < W) the last step is
filled up to W with repeats. ``"pad"`` fills the last step up to G; ``"drop"``
leaves out the last r items. So all ranks make the same number of steps, none
gets an empty batch or one of more than ceil(G / W) items, and a rest that is
cut anew from any step boundary has the boundaries it had before.

A **repeat** is a position at or behind the epoch's length: it stands for the
item at that position modulo the length. Repeats can only be the last positions
of an epoch, hence the last of each rank's batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any, Literal, NoReturn, get_args

from raycheck.errors import CheckpointMismatchError, ConfigError

Remainder = Literal["exact", "drop", "pad"]

FORMAT = 1

_MAX_COUNT = (1 << 63) - 1
"""Of anything that a saved position counts."""

TABLE_MAX_ITEMS = 1024
"""Up to this length an order is a shuffled table; beyond it, a Feistel network.

The network takes constant memory at any length but does not reach all
permutations of a handful of items (over a square number of items it reaches
even ones only), which is where one could tell.
"""

NUM_ROUNDS = 8
"""Rounds of the Feistel network. Joint statistics of neighbours show bias below 6, none from 8 on."""

MASK = (1 << 64) - 1
MIX_FIRST = 0xBF58476D1CE4E5B9
MIX_SECOND = 0x94D049BB133111EB
GOLDEN = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How the items that remain are cut into steps and dealt to the ranks.

    Raises:
        ConfigError: If a value is wrong, or values do not go together.
    """

    world_size: int = 1

    batch_size: int = 1
    """Items per rank and step at most. Not to be given together with ``global_batch_size``."""

    global_batch_size: int | None = None
    """Items per step over all ranks, kept at any world size. None: ``batch_size * world_size``."""

    remainder: Remainder = "exact"
    """What becomes of items that do not fill a step; see the module's text."""

    may_split: bool = True
    """False: all steps but the last are full, since something else cuts the batches.

    Then ``exact`` fills up a remainder of fewer items than ranks with repeats.
    """

    def __post_init__(self) -> None:
        check_int("world_size", self.world_size, 1)
        check_int("batch_size", self.batch_size, 1)
        if self.remainder not in get_args(Remainder):
            refuse("remainder", self.remainder, 'one of "exact", "drop", "pad"')
        if self.global_batch_size is None:
            return
        check_int("global_batch_size", self.global_batch_size, 1)
        if self.global_batch_size < self.world_size:
            refuse(
                "global_batch_size",
                self.global_batch_size,
                f"at least world_size={self.world_size}, so that each rank gets an item in every step: "
                "raise it or use fewer ranks",
            )
        if self.batch_size != 1:
            refuse(
                "batch_size",
                self.batch_size,
                f"left out where global_batch_size={self.global_batch_size} is given: "
                "the items per rank follow from it",
            )

    @property
    def step_items(self) -> int:
        """Items of a full step, over all ranks."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return self.batch_size * self.world_size

    @property
    def rank_items(self) -> int:
        """Items of a full step on one rank, at most."""
        return -(-self.step_items // self.world_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in the data, independent of world size and batch size."""

    length: int
    """Items of the data set."""

    seed: int = 0
    shuffle: bool = False
    epoch: int = 0

    consumed: int = 0
    """Positions of the epoch's order that are behind us, over all ranks; ``length`` at its end.

    Items left out by ``remainder="drop"`` count once the last step is done, so
    that no smaller world size finds another step in them.
    """

    def __post_init__(self) -> None:
        check_int("length", self.length, 0)
        check_int("seed", self.seed, None)
        check_int("epoch", self.epoch, 0)
        check_int("consumed", self.consumed, 0)
        if not isinstance(self.shuffle, bool):
            refuse("shuffle", self.shuffle, "True or False")
        if self.consumed > self.length:
            refuse("consumed", self.consumed, f"at most length={self.length}")

    def at(self, epoch: int, consumed: int = 0) -> Cursor:
        """Return the cursor of the same data at another place."""
        return dataclasses.replace(self, epoch=epoch, consumed=consumed)


@dataclasses.dataclass(frozen=True, slots=True)
class Rest:
    """What remains of an epoch from a cursor on, as steps numbered from 0.

    Every method takes O(1), whatever the position and the length.
    """

    cursor: Cursor
    dealing: Dealing

    num_steps: int = dataclasses.field(init=False)
    """Steps that remain, the same on every rank."""

    num_planned: int = dataclasses.field(init=False)
    """Items that the steps take: without dropped ones, with repeats."""

    def __post_init__(self) -> None:
        num_steps, num_left = divmod(self.num_items, self.dealing.step_items)
        if num_left and self.dealing.remainder != "drop":
            num_steps += 1
        object.__setattr__(self, "num_steps", num_steps)
        object.__setattr__(self, "num_planned", self._plan_items(num_steps))

    def _plan_items(self, num_steps: int) -> int:
        full, world_size = self.dealing.step_items, self.dealing.world_size
        if self.dealing.remainder != "exact":
            return num_steps * full
        if num_steps == 0 or (self.dealing.may_split and num_steps * world_size <= self.num_items):
            return self.num_items
        return max(self.num_items, (num_steps - 1) * full + world_size)

    @property
    def num_items(self) -> int:
        """Items that remain, those to be dropped included."""
        return self.cursor.length - self.cursor.consumed

    @property
    def num_repeats(self) -> int:
        """Items that the last step takes a second time, over all ranks."""
        return max(0, self.num_planned - self.num_items)

    @property
    def num_dropped(self) -> int:
        """Items that no step takes."""
        return max(0, self.num_items - self.num_planned)

    @property
    def num_full_steps(self) -> int:
        """Steps, counted from the first, that take ``step_items``; what the later ones take only `span` says."""
        full, world_size = self.dealing.step_items, self.dealing.world_size
        if full == world_size:
            return self.num_steps
        # From where `_begin` keeps items back for later steps on.
        return min(self.num_steps, (self.num_planned - self.num_steps * world_size) // (full - world_size))

    def span(self, step: int) -> range:
        """Return the positions of a step, over all ranks.

        They run past the epoch's length where the step has repeats.

        Raises:
            IndexError: If there is no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        return range(self._begin(step), self._begin(step + 1))

    def positions(self, step: int, rank: int) -> range:
        """Return the positions of a step that go to a rank: 1 to ``rank_items`` of them.

        Raises:
            IndexError: If there is no such step.
        """
        return self.span(step)[rank :: self.dealing.world_size]

    def after(self, num_steps: int) -> Cursor:
        """Return the cursor after that many of the steps.

        After the last one the epoch is finished, whatever was dropped.

        Raises:
            IndexError: If fewer steps remain.
        """
        if not 0 <= num_steps <= self.num_steps:
            raise IndexError(f"{num_steps} steps of {self.num_steps}")
        if num_steps == 0:
            return self.cursor
        if num_steps == self.num_steps:
            return self.cursor.at(self.cursor.epoch, self.cursor.length)
        return self.cursor.at(self.cursor.epoch, self._begin(num_steps))

    def _begin(self, step: int) -> int:
        # As much as full steps take, but one item per rank stays for each later step.
        full = step * self.dealing.step_items
        kept = (self.num_steps - step) * self.dealing.world_size
        return self.cursor.consumed + min(full, self.num_planned - kept)


def count_repeats(positions: range, length: int) -> int:
    """Return how many of a rank's positions are repeats; they are its last ones."""
    return len(positions) - len(range(positions.start, min(positions.stop, length), positions.step))


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """The order of an epoch: which item stands at which position.

    A bijection on ``range(length)``; positions from ``length`` on start over.
    Up to `TABLE_MAX_ITEMS` a shuffled table. Beyond, a Feistel network over a
    grid of ``num_rows * num_columns`` cells, as square as it can be, that hold
    the items row by row: rounds shift the row by a hash of the column and the
    column by a hash of the row, and a result in one of the few cells behind the
    last item goes round again. Constant memory; 3.5 us per item on one core,
    at any length (``data.sampler`` computes the same by NumPy in 0.1 us).
    """

    length: int
    keys: tuple[int, ...] = ()
    """Of the network's rounds. Empty: no network."""

    table: tuple[int, ...] = ()
    """Items by position. Empty: no table. With neither, items stand in their own order."""

    @property
    def num_rows(self) -> int:
        """Rows of the grid."""
        return math.isqrt(self.length - 1) + 1

    @property
    def num_columns(self) -> int:
        """Columns of the grid."""
        return -(-self.length // self.num_rows)

    def item(self, position: int) -> int:
        """Return the item at a position.

        Raises:
            IndexError: If there are no items, or the position is negative.
        """
        if position < 0 or self.length == 0:
            raise IndexError(f"position {position} of {self.length} items")
        cell = position % self.length
        if self.table:
            return self.table[cell]
        if not self.keys:
            return cell
        cell = self._encipher(cell)
        while cell >= self.length:
            cell = self._encipher(cell)
        return cell

    def _encipher(self, cell: int) -> int:
        num_rows, num_columns = self.num_rows, self.num_columns
        row, column = divmod(cell, num_columns)
        for row_key, column_key in zip(self.keys[::2], self.keys[1::2], strict=True):
            row = (row + mix(column + row_key)) % num_rows
            column = (column + mix(row + column_key)) % num_columns
        return row * num_columns + column


def order_of(cursor: Cursor) -> Order:
    """Return the order of a cursor's epoch: a function of seed, epoch and length.

    Identity without ``shuffle``. Takes up to a millisecond.
    """
    length = cursor.length
    if not cursor.shuffle or length < 2:
        return Order(length)
    text = f"raycheck order {FORMAT}:{cursor.seed}:{cursor.epoch}:{length}"
    digest = hashlib.shake_256(text.encode()).digest(8 * NUM_ROUNDS)
    keys = tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))
    if length > TABLE_MAX_ITEMS:
        return Order(length, keys=keys)
    return Order(length, table=_shuffled(length, keys[0]))


def _shuffled(length: int, key: int) -> tuple[int, ...]:
    items = list(range(length))
    for last in range(length - 1, 0, -1):
        other = mix(key + last * GOLDEN) % (last + 1)
        items[last], items[other] = items[other], items[last]
    return tuple(items)


def mix(value: int) -> int:
    """Return a 64-bit hash of an integer modulo 2^64: the finalizer of SplitMix64."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_FIRST) & MASK
    value = ((value ^ (value >> 27)) * MIX_SECOND) & MASK
    return value ^ (value >> 31)


def batch_seed(seed: int, epoch: int, position: int) -> int:
    """Return the 64-bit seed of the random draws for a batch, by its first position.

    The same for the same batch in every run; other ranks, steps and epochs
    have other seeds.
    """
    text = f"raycheck batch {FORMAT}:{seed}:{epoch}:{position}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def batch_seed_in(epoch_seed: int, position: int) -> int:
    """Return the 64-bit seed of a batch from that of its epoch, ``batch_seed(seed, epoch, 0)``.

    SplitMix64's output at that place: 1 us, where the hash takes 4 on every batch's way.
    """
    return mix(epoch_seed + position * GOLDEN)


def encode_cursor(cursor: Cursor, dealing: Dealing) -> dict[str, Any]:
    """Return a cursor, and how it came about, as plain JSON values."""
    return {
        "format": FORMAT,
        **dataclasses.asdict(cursor),
        "world_size": dealing.world_size,
        "batch_size": dealing.batch_size,
        "global_batch_size": dealing.global_batch_size,
    }


def decode_cursor(state: dict[str, Any]) -> tuple[Cursor, Dealing]:
    """Return what `encode_cursor` wrote.

    Raises:
        CheckpointMismatchError: If it is nothing that it writes.
    """
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    # Its type first: an array that is compared gives another array.
    if type(found) is not int or found != FORMAT:
        raise CheckpointMismatchError(
            f"not a data position of format {FORMAT} but {found!r}: "
            "a newer raycheck wrote it, or another loader's state was passed",
            saved=found,
            given=FORMAT,
        )
    try:
        cursor = Cursor(**{field.name: state[field.name] for field in dataclasses.fields(Cursor)})
        names = ("world_size", "batch_size", "global_batch_size")
        dealing = Dealing(**{name: state[name] for name in names})
        if max(cursor.length, cursor.epoch, dealing.step_items) > _MAX_COUNT:
            refuse("length", cursor.length, f"a position whose numbers are at most {_MAX_COUNT}")
    except (KeyError, ConfigError) as error:
        raise CheckpointMismatchError(f"the saved data position is damaged: {error}") from error
    return cursor, dealing


def check_same_data(saved: Cursor, given: Cursor) -> None:
    """Check that a saved position is one in the data at hand.

    Raises:
        CheckpointMismatchError: If length, seed or shuffle changed. Attributes
            ``field``, ``saved``, ``given``.
    """
    for name, what in (("length", "items"), ("seed", "seed"), ("shuffle", "shuffle")):
        before, now = getattr(saved, name), getattr(given, name)
        if before != now:
            raise CheckpointMismatchError(
                f"the checkpoint was saved with {what}={before!r} and the loader has {what}={now!r}: its "
                f"position, epoch {saved.epoch} after {saved.consumed} of {saved.length} items, would mean "
                f"other items. Pass the data that it was saved with ({what}={before!r}), or start this "
                f"data anew: do not load the position, and call set_epoch({saved.epoch + 1})",
                field=name,
                saved=before,
                given=now,
            )


def describe_batch_change(saved: Dealing, given: Dealing) -> str | None:
    """Return a warning if batches have another size than when the position was saved, or None.

    Another world size alone is no change, with either kind of batch size.
    """
    if saved.step_items == given.step_items:
        return None
    is_per_rank = saved.global_batch_size is None and given.global_batch_size is None
    if is_per_rank and saved.batch_size == given.batch_size:
        return None
    return (
        f"the batch size changed: saved with {_describe(saved)}, now {_describe(given)}. The rest of the "
        "epoch is cut into the new batches, every item still once; check what depends on the batch size, "
        "such as the learning rate"
    )


def _describe(dealing: Dealing) -> str:
    if dealing.global_batch_size is not None:
        return f"global_batch_size={dealing.global_batch_size}"
    return f"batch_size={dealing.batch_size} on {dealing.world_size} ranks"


def check_int(field: str, value: object, low: int | None) -> None:
    """Check that a setting is a whole number, at least ``low``.

    Raises:
        ConfigError: If it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        refuse(field, value, "a whole number" + (f", at least {low}" if low is not None else ""))


def refuse(field: str, value: object, allowed: str) -> NoReturn:
    """Raise ConfigError for a setting, saying what it must be."""
    raise ConfigError(f"{field}={value!r}: must be {allowed}", field=field, value=value)
