"""Samplers for a plain torch ``DataLoader`` that resume anywhere, at any world size."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from raycheck.core.audit import Ledger, encode_account
from raycheck.core.cursor import (
    MIX_FIRST,
    MIX_SECOND,
    Cursor,
    Dealing,
    Order,
    Remainder,
    Rest,
    check_int,
    check_same_data,
    count_repeats,
    decode_cursor,
    describe_batch_change,
    encode_cursor,
    order_of,
    refuse,
)
from raycheck.errors import CheckpointMismatchError, ConfigError

BLOCK_ITEMS = 2048
"""Items whose place in the order is computed at a time: enough to spread NumPy's cost per call."""


class Counting(enum.Enum):
    """Who counts the batches that training consumes."""

    NOBODY = "nobody"
    HAND = "advance()"
    LOADER = "the loader"
    STEP = "ckpt.step()"


class DataPosition:
    """Where training is in the data: what both samplers share.

    The position is what training *consumed*, as told by `advance`. What an
    iterator gave out does not move it, since workers prefetch. A new iterator
    goes on from the position: after a ``break`` with the first batch that was
    not consumed, and at the end of an epoch with the next one.

    Without any call of `advance` the position stays where the iterator started.
    An iterator that gave out its last batch then ends the epoch, so that plain
    training loops work; but a saved position is the start of the pass, and
    items are repeated after a resume (never left out).

    Args:
        dataset: Anything with a length; it is not read.
        batch_size: Items per rank and step.
        shuffle: Another order in every epoch. Otherwise the data set's own.
        seed: Of the orders. Must be the same on all ranks.
        remainder: What becomes of items that do not fill a step: "exact", "drop" or "pad".
        global_batch_size: Items per step over all ranks, kept at any world
            size; in place of ``batch_size``.
        rank: Default: that of ``torch.distributed`` if initialised, else 0.
        world_size: Default likewise, else 1.

    Raises:
        ConfigError: If a value is wrong.
    """

    _may_split = True

    def __init__(
        self,
        dataset: Sized,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        remainder: Remainder = "exact",
        global_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.rank, world_size = _place(rank, world_size)
        self._dealing = Dealing(
            world_size=world_size,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            remainder=remainder,
            may_split=self._may_split,
        )
        self._check()
        self._counting = Counting.NOBODY
        self.has_counted_pass = False
        """Whether an iterator that counts was made since `count_by`. For raycheck itself."""

        self._num_produced_before = 0
        self._set_to(Cursor(length=len(dataset), seed=seed, shuffle=shuffle))

    def _check(self) -> None:
        """Refuse what this kind of sampler cannot do."""

    @property
    def cursor(self) -> Cursor:
        """The position reached, the same on every rank."""
        return self._rest.after(self._num_consumed)

    @property
    def place(self) -> str:
        """Where this rank is, as a text that must be the same on all ranks. For raycheck itself."""
        return f"epoch {self.epoch} after {self.cursor.consumed} items"

    @property
    def dealing(self) -> Dealing:
        """How the epoch is cut into steps and dealt to the ranks. For raycheck itself."""
        return self._dealing

    @property
    def epoch(self) -> int:
        """The epoch of the position; at its end still that epoch."""
        return self._rest.cursor.epoch

    @property
    def batch_size(self) -> int:
        """Items of a full step on one rank, at most."""
        return self._dealing.rank_items

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch at this world size, wherever the position is."""
        return Rest(self._rest.cursor.at(self.epoch), self._dealing).num_steps

    @property
    def last_positions(self) -> range:
        """Positions, in the order of `epoch`, of this rank's batch that was consumed last. May be empty."""
        if not self._num_consumed:
            return range(0)
        return self._rest.positions(self._num_consumed - 1, self.rank)

    @property
    def last_indices(self) -> list[int]:
        """Items of this rank's batch that was consumed last, as indices of the data set."""
        return self._items_of(self.last_positions)

    @property
    def num_padded(self) -> int:
        """How many of `last_indices` are repeats of items used before: its last ones."""
        positions = self.last_positions
        num_repeats = count_repeats(positions, self._rest.cursor.length)
        return len(self._items_of(positions[len(positions) - num_repeats :]))

    def advance(self, num_batches: int = 1) -> None:
        """Count this rank's next batches as consumed. Call it once per training step, on every rank.

        Raises:
            ConfigError: If fewer batches remain of this epoch.
        """
        check_int("num_batches", num_batches, 0)
        if self._counting in (Counting.LOADER, Counting.STEP):
            raise ConfigError(
                f"advance({num_batches}): {self._counting.value} counts the batches of this "
                f"{type(self).__name__}, which was passed to attach(), and each would count twice; remove the "
                "calls of advance()",
                field="num_batches",
                value=num_batches,
            )
        self._counting = Counting.HAND
        self._advance(num_batches)

    def count_by(self, counting: Counting) -> None:
        """Say who counts from now on. For raycheck itself: `attach`."""
        self._counting = counting
        self.has_counted_pass = False
        self._num_produced_before = self._num_produced

    @property
    def is_read_uncounted(self) -> bool:
        """Whether batches are given out since `count_by`, to an iterator that was made before. For raycheck itself."""
        return not self.has_counted_pass and self._num_produced > self._num_produced_before

    def end_step(self) -> None:
        """Count one batch for a step, unless `advance` is called by hand. For raycheck itself: ``ckpt.step()``."""
        if self._counting is Counting.HAND:
            return
        self._counting = Counting.STEP
        if self._num_consumed == self._rest.num_steps:
            raise ConfigError(
                f"ckpt.step() counts one batch per step, and epoch {self.epoch} had no batch left. Pass the "
                f"DataLoader to attach() in place of its {type(self).__name__}: then the batches that the loop "
                "receives are counted, however many there are to a step",
                field="step",
                value=self._num_consumed + 1,
            )
        self._num_consumed += 1

    def count(self) -> None:
        """Count one batch that the loop has received: without checks, on every batch's way. For raycheck itself."""
        self._num_consumed += 1

    def end_pass(self) -> None:
        """Take note that the loop has seen the end of a pass. For raycheck itself."""

    def _advance(self, num_batches: int) -> None:
        num_left = self._rest.num_steps - self._num_consumed
        if num_batches > num_left:
            refuse("num_batches", num_batches, f"at most the {num_left} that remain of epoch {self.epoch}")
        self._num_consumed += num_batches

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: to its start, or if it is the present one, nowhere.

        So after a resume the usual ``set_epoch`` at the head of the loop keeps
        the restored position; an epoch that is finished then gives no batches.

        Raises:
            ConfigError: If it is no epoch number.
        """
        check_int("epoch", epoch, 0)
        if epoch != self.epoch:
            self._go_to(self.cursor.at(epoch))
        elif self._is_over:
            self._go_to(self.cursor)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON values. The same on every rank.

        Warns if batches were given out and nothing was ever counted.
        """
        if self._num_produced and self._counting is Counting.NOBODY:
            warnings.warn(
                f"{type(self).__name__} gave out {self._num_produced} batches of epoch {self.epoch} and was "
                "never told that one was consumed, so the saved position is that before them. Call "
                "sampler.advance() after each training step, or use raycheck.DataLoader, which counts itself",
                RuntimeWarning,
                stacklevel=2,
            )
        return encode_cursor(self.cursor, self._dealing)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise what `load_state_dict` would, changing nothing."""
        saved, _ = decode_cursor(state)
        check_same_data(saved, self._rest.cursor)
        self._check_order(state, saved.epoch)

    def _check_order(self, state: dict[str, Any], epoch: int) -> None:
        if state.get("order") is not None:
            raise CheckpointMismatchError(
                "the checkpoint was saved with a sampler or batch_sampler and the loader has none, so that its "
                "position would mean other items. Pass the sampler that it was saved with",
                field="sampler",
                saved=state["order"],
                given=None,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, saved at any world size. The next iterator starts there.

        Warns on rank 0 if the batch size changed.

        Raises:
            CheckpointMismatchError: If it is a position in other data: length,
                seed or shuffle changed. The present position stays.
        """
        self.check_state_dict(state)
        saved, dealing = decode_cursor(state)
        change = describe_batch_change(dealing, self._dealing)
        if change and self.rank == 0:
            warnings.warn(change, UserWarning, stacklevel=2)
        self._set_to(saved)

    def account(self) -> dict[str, Any]:
        """Return what was consumed since the position was last loaded, as plain JSON values."""
        return encode_account(self.cursor, self._dealing, self._ledger)

    def _set_to(self, cursor: Cursor) -> None:
        """Go to a place from which a new account begins."""
        self._rest, self._num_consumed = Rest(cursor, self._dealing), 0
        self._ledger = Ledger(cursor)
        self._go_to(cursor)

    def _go_to(self, cursor: Cursor) -> None:
        self._ledger.move(self.cursor, cursor)
        self._rest = Rest(cursor, self._dealing)
        self._order = order_of(cursor)
        self._num_consumed = 0
        self._num_produced = 0
        self._has_begun = False

    @property
    def _is_over(self) -> bool:
        # What prefetching workers took says nothing about what training used, so
        # it decides only where nobody counts.
        is_counted = self._counting is not Counting.NOBODY
        num_done = self._num_consumed if is_counted else self._num_produced
        return self._has_begun and num_done == self._rest.num_steps

    def _begin(self) -> None:
        """Make the rest of the epoch, or the next epoch, what an iterator now goes through."""
        self._go_to(self.cursor.at(self.epoch + 1) if self._is_over else self.cursor)
        self._has_begun = True

    @property
    def _shown(self) -> Rest:
        """What ``len`` speaks of: the pass, or when it is over a whole epoch."""
        return Rest(self._rest.cursor.at(self.epoch), self._dealing) if self._is_over else self._rest

    def _produce(self) -> Iterator[tuple[int, list[int]]]:
        """Yield first position and items of each batch of the present rest, in the order of the steps."""
        rest, order = self._rest, self._order
        block_steps = max(1, BLOCK_ITEMS // self.batch_size)
        for first in range(0, rest.num_steps, block_steps):
            for batch in self._block(rest, order, range(first, min(first + block_steps, rest.num_steps))):
                if rest is self._rest:
                    self._num_produced += 1
                yield batch

    def _items_of(self, positions: range) -> list[int]:
        """Return the items at some positions of the epoch's order."""
        return _items(self._order, positions)

    def _block(self, rest: Rest, order: Order, steps: range) -> Iterable[tuple[int, list[int]]]:
        """Return the batches of some steps; of full steps, which are nearly all, at once."""
        if steps.stop > rest.num_full_steps:
            batches = [rest.positions(step, self.rank) for step in steps]
            return [(batch.start, _items(order, batch)) for batch in batches]
        first = rest.positions(steps.start, self.rank)
        stride = rest.dealing.step_items
        starts = range(first.start, first.start + len(steps) * stride, stride)
        positions = np.add.outer(
            np.arange(len(steps), dtype=np.uint64) * np.uint64(stride),
            np.arange(first.start, first.stop, first.step, dtype=np.uint64),
        )
        items = items_at(order, positions.ravel()).reshape(positions.shape)
        return zip(starts, items.tolist(), strict=True)


class ElasticBatchSampler(DataPosition, Sampler[list[int]]):
    """Batches for ``DataLoader(dataset, batch_sampler=...)`` that resume anywhere, at any world size.

    Every item once per epoch, and the same number of batches on every rank.
    A plain ``DataLoader`` does not tell its sampler what training consumed:
    call `advance` after each step. ``raycheck.DataLoader`` does that itself.

    Arguments and methods as of `DataPosition`. ``len`` is the number of batches
    of the pass, which is the rest of an epoch after a resume; and of a whole
    epoch once the pass gave out its last batch.
    """

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches from the position on; in the next epoch, if this one is over."""
        # Begins at the first batch, no earlier: torch makes two iterators and uses the second.
        self._begin()
        for _, items in self._produce():
            yield items

    def __len__(self) -> int:
        return self._shown.num_steps


class ElasticSampler(DataPosition, Sampler[int]):
    """Indices for ``DataLoader(dataset, batch_size, sampler=...)`` that resume anywhere.

    ``batch_size`` must be the loader's, whose batches this sampler cannot cut.
    So with ``remainder="exact"`` a remainder of fewer items than ranks is filled
    up with repeats (`ElasticBatchSampler` needs none), and a ``global_batch_size``
    must be a multiple of the world size. Leave the loader's ``drop_last`` False.

    Arguments and methods as of `DataPosition`; `advance` counts batches.
    ``len`` is the number of this rank's indices in what `ElasticBatchSampler`'s
    counts the batches of.
    """

    _may_split = False

    def _check(self) -> None:
        dealing = self._dealing
        if dealing.step_items % dealing.world_size:
            refuse(
                "global_batch_size",
                dealing.global_batch_size,
                f"a multiple of world_size={dealing.world_size}, since the loader's batches all have one size; "
                "use ElasticBatchSampler for others",
            )

    def __iter__(self) -> Iterator[int]:
        """Yield the indices from the position on; in the next epoch, if this one is over."""
        self._begin()
        for _, items in self._produce():
            yield from items

    def __len__(self) -> int:
        rest = self._shown
        if not rest.num_steps:
            return 0
        num_full = rest.num_steps - 1
        return num_full * self.batch_size + len(rest.positions(num_full, self.rank))


def default_place() -> tuple[int, int]:
    """Return rank and world size of ``torch.distributed``; (0, 1) where it is not initialised."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        field, value = ("rank", rank) if world_size is None else ("world_size", world_size)
        refuse(field, value, "given together with the other of rank and world_size, or neither")
    if rank is None or world_size is None:
        return default_place()
    check_int("world_size", world_size, 1)
    check_int("rank", rank, 0)
    if rank >= world_size:
        raise ConfigError(
            f"rank={rank}: must be less than world_size={world_size}; ranks count from 0",
            field="rank",
            value=rank,
        )
    return rank, world_size


def _items(order: Order, positions: range) -> list[int]:
    if not positions:
        return []
    items: list[int] = items_at(order, np.arange(*_bounds(positions), dtype=np.uint64)).tolist()
    return items


def _bounds(positions: range) -> tuple[int, int, int]:
    return positions.start, positions.stop, positions.step


def items_at(order: Order, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return ``order.item`` of each position, computed by NumPy.

    0.06 us per item on one core, in blocks of 2,048.
    """
    cells = _modulo(positions, np.uint64(order.length))
    if order.table:
        return np.take(np.array(order.table, np.uint64), cells)
    if not order.keys:
        return cells
    cells = _encipher(order, cells)
    beyond = np.flatnonzero(cells >= order.length)
    while beyond.size:
        cells[beyond] = _encipher(order, cells[beyond])
        beyond = beyond[cells[beyond] >= order.length]
    return cells


def _encipher(order: Order, cells: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    num_rows, num_columns = np.uint64(order.num_rows), np.uint64(order.num_columns)
    row = cells // num_columns
    column = cells - row * num_columns
    for row_key, column_key in zip(order.keys[::2], order.keys[1::2], strict=True):
        row = _shift(row, _mix(column + np.uint64(row_key)), num_rows)
        column = _shift(column, _mix(row + np.uint64(column_key)), num_columns)
    return row * num_columns + column


def _shift(
    value: npt.NDArray[np.uint64], offset: npt.NDArray[np.uint64], modulus: np.uint64
) -> npt.NDArray[np.uint64]:
    """Return ``(value + offset) % modulus`` for values below the modulus."""
    total = value + _modulo(offset, modulus)
    # The smaller of the two: below the modulus, the difference wraps to a huge number.
    shifted: npt.NDArray[np.uint64] = np.minimum(total, total - modulus)
    return shifted


def _modulo(value: npt.NDArray[np.uint64], modulus: np.uint64) -> npt.NDArray[np.uint64]:
    # NumPy divides by a scalar with vector instructions, but has none for ``%``: 1.1 ns, not 2.8.
    return value - value // modulus * modulus


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(MIX_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(MIX_SECOND)
    return value ^ (value >> np.uint64(31))
