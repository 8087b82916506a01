"""``raycheck.DataLoader``: torch's, with a position that is saved, restored and resized."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset

from raycheck.core.cursor import Cursor, Order, Remainder, Rest, batch_seed, batch_seed_in, check_int, refuse
from raycheck.data.given import GivenOrder, check_alone
from raycheck.data.sampler import Counting, ElasticBatchSampler
from raycheck.errors import ConfigError

Item = TypeVar("Item", covariant=True)


class DataLoader(torch.utils.data.DataLoader[Item]):
    """A torch ``DataLoader`` that gives every item once per epoch, whatever interrupts it.

    Takes the arguments of torch's and behaves as it does, with these additions.

    **Position.** A batch counts as consumed when the loop receives it, not when
    a worker fetches it. `state_dict` in the loop's body, after the batch was
    used, is the position behind that batch; `load_state_dict` goes there, at
    any world size and without reading what lies before. A new iterator always
    goes on from the position: after a ``break`` at the next batch, after an
    epoch's last batch in the next epoch. (Torch's would start over. To look at
    a batch without consuming it, load the state from before the look.) An older
    iterator of the same loader then ends with an error. One that has given no
    batch yet follows the position where it is loaded or set: frameworks make
    their iterator before they call back. All ranks must take the same number
    of batches.

    **Dealing.** Each rank gets its part of each step's items: no
    ``DistributedSampler`` is needed. The last batches may be smaller, and only
    where no exact deal exists the last one is filled up with repeats, which are
    the last `num_padded` of `last_indices`.

    **Order.** Shuffled by seed and epoch, or the data set's own; or that of a
    ``sampler`` of yours, which is drawn whole when an epoch begins, the same on
    every rank, and dealt like any other. A ``batch_sampler`` gives whole batches:
    one goes to each rank in each step, and counts as one position; what it
    leaves over is filled up with repeated batches, or dropped. Its orders must be
    functions of the epoch: what it draws from the generators of Python, NumPy
    and torch, or from a ``torch.Generator`` in its attribute ``generator``, is.
    A restored position checks that it gives the same order again.

    **Randomness.** With worker processes the generators of Python, NumPy and
    torch (CPU) are seeded before each batch from seed, epoch and the position
    of the batch's first item: draws in the data set and ``collate_fn`` are the
    same after a resume, and with any number of workers. At another world size
    batches consist of other items, and so draws differ. A seed set in
    ``worker_init_fn`` does not last; generators that a data set owns are its own
    affair. With ``num_workers=0`` these draws come from the training process's
    generators, as in torch, and resume when those are restored.
    Iterating draws nothing from the training process's generators itself.

    Args:
        dataset: Map-style, with a length. Its items must not change while it is used.
        batch_size: Items per rank and step.
        shuffle: Another order in every epoch, a function of seed and epoch.
        seed: Of order and draws; the same on all ranks.
        remainder: "exact", "drop" or "pad": what becomes of items that do not
            fill a step. ``drop_last=True`` means "drop".
        global_batch_size: Items per step over all ranks, the same at any world
            size; in place of ``batch_size``.
        sampler: Gives the indices of an epoch for all ranks, in place of ``shuffle``.
        batch_sampler: Gives lists of them, in place of ``batch_size`` too.
        rank: Default: that of ``torch.distributed`` if initialised, else 0.
        world_size: Default likewise, else 1.
        **torch_options: Other arguments of torch's ``DataLoader``: workers,
            prefetch, pinned memory, ``collate_fn``, ``generator`` and so on.

    Raises:
        ConfigError: If a value is wrong, or asks for what cannot resume: an
            iterable-style data set, ``in_order=False``, a ``DistributedSampler``.
    """

    def __init__(
        self,
        dataset: Dataset[Item],
        batch_size: int = 1,
        shuffle: bool | None = False,
        *,
        seed: int = 0,
        remainder: Remainder = "exact",
        global_batch_size: int | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **torch_options: Any,
    ) -> None:
        _check_dataset(dataset)
        remainder = _take_options(torch_options, remainder=remainder)
        shuffle = False if shuffle is None else shuffle
        if batch_sampler is not None:
            others = {"batch_size": (batch_size, 1), "global_batch_size": (global_batch_size, None)}
            check_alone("batch_sampler", {**others, "shuffle": (shuffle, False), "sampler": (sampler, None)})
        elif sampler is not None:
            check_alone("sampler", {"shuffle": (shuffle, False)})
        make = _LoaderPosition if batch_sampler is None and sampler is None else _GivenPosition
        position = make(
            _ordered(dataset, sampler=sampler, batch_sampler=batch_sampler, seed=seed),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            remainder=remainder,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
        )
        # Torch draws the workers' first seed here whenever an iterator starts. From the
        # global generator, a resumed run would draw once more than one without interruption.
        if torch_options.get("generator") is None:
            torch_options["generator"] = torch.Generator().manual_seed(batch_seed(seed, 0, 0) >> 1)
        super().__init__(dataset, batch_sampler=position, **torch_options)
        # Torch sets these as for a batch sampler of unknown kind and then locks them.
        object.__setattr__(self, "batch_size", position.batch_size)
        object.__setattr__(self, "drop_last", remainder == "drop")
        position.count_by(Counting.LOADER)
        self.is_counted_outside = False
        self._position = position
        self._iterator_number = self._pass_number = 0

    @property
    def epoch(self) -> int:
        """The epoch of the position; at its end still that epoch."""
        return self._position.epoch

    @property
    def cursor(self) -> Cursor:
        """The position behind the last batch that the loop received, the same on every rank."""
        return self._position.cursor

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch at this world size. ``len`` is that of the pass: a rest after a resume."""
        return self._position.steps_per_epoch

    @property
    def last_positions(self) -> range:
        """Where in the order of `epoch` the batch stood that this rank received last. Empty before one."""
        return self._position.last_positions

    @property
    def last_indices(self) -> list[int]:
        """The data set's indices of the batch that this rank received last."""
        return self._position.last_indices

    @property
    def num_padded(self) -> int:
        """How many of `last_indices`, its last ones, are repeats of items used before."""
        return self._position.num_padded

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        """Return the batches from the position on; in the next epoch, if this one is over.

        Starts worker processes as torch does, but none where no batch is left.
        """
        self._iterator_number += 1
        self._pass_number += 1
        return _Batches(self)

    def _begin(self) -> Iterator[Any]:
        self._position.begin(seeds_workers=self.num_workers > 0)
        return super().__iter__() if len(self) else iter(())

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: to its start, or if it is the present one, nowhere.

        So after a resume the usual ``set_epoch`` at the head of the loop keeps
        the restored position; an epoch that is finished then gives no batches.

        Raises:
            ConfigError: If it is no epoch number.
        """
        is_other = epoch != self.epoch
        self._position.set_epoch(epoch)
        self._iterator_number += is_other

    def advance(self, num_batches: int = 1) -> None:
        """Go past batches without reading them, on every rank: one that cannot be read, say.

        Raises:
            ConfigError: If fewer remain of this epoch.
        """
        self._position.skip(num_batches)
        self._iterator_number += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that the loop received; the same on every rank."""
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, saved at any world size. The next iterator starts there.

        Warns on rank 0 if the batch size changed.

        Raises:
            CheckpointMismatchError: If it is a position in other data: length,
                seed or shuffle changed. The present position stays.
        """
        self._position.load_state_dict(state)
        self._iterator_number += 1

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise what `load_state_dict` would, changing nothing."""
        self._position.check_state_dict(state)

    def account(self) -> dict[str, Any]:
        """Return what was consumed since the position was last loaded, as plain JSON values."""
        return self._position.account()


class _Batches(Iterator[Any]):
    """One pass over a loader. Counts what is taken from it; out of date once the loader's number moves on."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._batches = loader._begin()
        self._number, self._pass_number = loader._iterator_number, loader._pass_number
        self._has_begun = False
        # Around a loader that fetches ahead, what it yields is counted, not what it fetches.
        self._is_counted_outside = loader.is_counted_outside

    def __next__(self) -> Any:
        loader = self._loader
        if not self._has_begun and self._pass_number == loader._pass_number:
            self._follow()
        self._has_begun = True
        # Before the fetch: with persistent workers an older iterator would take a batch of the newer one's.
        if self._number != loader._iterator_number:
            raise RuntimeError(
                "this iterator of a raycheck.DataLoader is out of date: the loader was iterated anew, moved by "
                "set_epoch, advance or load_state_dict, or failed to read a batch. Iterate it again; it goes on "
                f"in epoch {loader.epoch} after {loader.cursor.consumed} items"
            )
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._is_counted_outside:
                loader._position.end_pass()
            raise
        except BaseException:
            # Torch may have gone past the batch or not, depending on what failed.
            loader._iterator_number += 1
            raise
        if not self._is_counted_outside:
            loader._position.count()
        return batch

    def _follow(self) -> None:
        """Begin anew where the position was moved to, if it was, before the first batch is taken."""
        if self._number != self._loader._iterator_number:
            self._number = self._loader._iterator_number
            self._batches = self._loader._begin()

    def __len__(self) -> int:
        return len(self._loader)


class _LoaderPosition(ElasticBatchSampler):
    """A loader's position. The loader says when a pass begins and ends, and counts what is consumed."""

    seeds_workers = False
    has_ended = False

    def begin(self, *, seeds_workers: bool) -> None:
        """Begin a pass."""
        self._begin()
        self.seeds_workers = seeds_workers

    def end_pass(self) -> None:
        """Note that the loop has seen the end of the pass."""
        self.has_ended = True

    def skip(self, num_batches: int) -> None:
        """Go past batches that nobody consumes: in the account they are a gap."""
        check_int("num_batches", num_batches, 0)
        reached = self.cursor
        self._advance(num_batches)
        self._ledger.move(reached, self.cursor)

    def __iter__(self) -> Iterator[Any]:
        if not self.seeds_workers:
            for _, items in self._produce():
                yield items
            return
        epoch_seed = batch_seed(self._rest.cursor.seed, self._rest.cursor.epoch, 0)
        for start, items in self._produce():
            yield _SeededBatch(items, epoch_seed, start)

    @property
    def _shown(self) -> Rest:
        # Until the pass has ended: ``len`` must not change in the last batch's loop body.
        return super()._shown if self.has_ended else self._rest

    def _go_to(self, cursor: Cursor) -> None:
        super()._go_to(cursor)
        self.has_ended = False


class _GivenPosition(_LoaderPosition):
    """A position in orders that a sampler of the user's own gives; its "data set" is these orders."""

    def __init__(self, given: GivenOrder, *args: Any, **options: Any) -> None:
        self._given = given
        super().__init__(given, *args, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and a digest of the order that it is in."""
        return {**super().state_dict(), "order": self._given.draw(self.epoch).digest}

    def _check_order(self, state: dict[str, Any], epoch: int) -> None:
        self._given.check_drawn_alike(epoch, state.get("order"))

    @property
    def place(self) -> str:
        """Where this rank is, and in which order."""
        return f"{super().place} of order {self._given.draw(self.epoch).digest}"

    def _items_of(self, positions: range) -> list[int]:
        return self._given.draw(self.epoch).at(positions)

    def _block(self, rest: Rest, order: Order, steps: range) -> Iterator[tuple[int, list[int]]]:
        entries = self._given.draw(rest.cursor.epoch)
        for step in steps:
            positions = rest.positions(step, self.rank)
            yield positions.start, entries.at(positions)


class _SeededBatch:
    """A batch's indices on their way to a worker process, whose generators they seed.

    Torch unpickles them in the worker right before it fetches the batch, and
    nowhere else. It is the one place before the fetch that leaves the data set
    (also as ``get_worker_info`` shows it), ``collate_fn`` and ``worker_init_fn``
    as the user gave them. What the worker gets is a plain list.
    """

    __slots__ = ("_parts",)

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_batch, self._parts


def _open_batch(items: list[int], epoch_seed: int, start: int) -> list[int]:
    drawn = batch_seed_in(epoch_seed, start)
    random.seed(drawn)
    np.random.seed(drawn % 2**32)
    # Not torch.manual_seed, which also queues seeds for devices that a worker does not use.
    torch.default_generator.manual_seed(drawn)
    return items


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        _refuse_dataset(
            dataset,
            "map-style, with a length and items by index: an iterable-style data set has no position that can be "
            "resumed; give it state_dict and load_state_dict, and pass it to attach() beside a plain torch DataLoader",
        )
    if not hasattr(dataset, "__len__"):
        _refuse_dataset(dataset, "a data set with a length, since every item is counted once per epoch")


def _refuse_dataset(dataset: Any, allowed: str) -> None:
    # By its type: its repr may print all of the data.
    name = type(dataset).__name__
    raise ConfigError(f"dataset of type {name}: must be {allowed}", field="dataset", value=name)


def _ordered(dataset: Any, *, sampler: Any, batch_sampler: Any, seed: int) -> Any:
    """Return what has the length that positions count: the orders of a sampler, or the data set."""
    if sampler is None and batch_sampler is None:
        return dataset
    field, given = ("batch_sampler", batch_sampler) if sampler is None else ("sampler", sampler)
    return GivenOrder(field, given, seed=seed, num_items=len(dataset))


def _take_options(options: dict[str, Any], *, remainder: Remainder) -> Remainder:
    """Take out of torch's options those that are decided here; return the remainder rule."""
    if not options.get("in_order", True):
        refuse(
            "in_order", False, "True: batches that overtake each other have no position that can be resumed"
        )
    if options.pop("drop_last", False):
        if remainder == "pad":
            refuse("drop_last", True, 'left out where remainder="pad" is given')
        return "drop"
    return remainder
