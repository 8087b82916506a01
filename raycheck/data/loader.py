"""``raycheck.DataLoader``: torch's, with a position that is saved, restored and resized."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset

from raycheck.core.cursor import Remainder, batch_seed, check_same_data, decode_cursor, refuse
from raycheck.data.sampler import ElasticBatchSampler

Item = TypeVar("Item", covariant=True)

OWN_ORDER = (
    "left out, since the loader orders the items itself, which is how it can go on at any of them. For an order "
    "or choice of your own pass torch.utils.data.Subset(dataset, indices); for weighted draws, which have no "
    "epoch, a plain torch DataLoader"
)


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
    iterator of the same loader then ends with an error. All ranks must take the
    same number of batches.

    **Dealing.** Each rank gets its part of each step's items: no
    ``DistributedSampler`` is needed. The last batches may be smaller, and only
    where no exact deal exists the last one is filled up with repeats, which are
    the last `num_padded` of `last_indices`.

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
        rank: Default: that of ``torch.distributed`` if initialised, else 0.
        world_size: Default likewise, else 1.
        **torch_options: Other arguments of torch's ``DataLoader``: workers,
            prefetch, pinned memory, ``collate_fn``, ``generator`` and so on.

    Raises:
        ConfigError: If a value is wrong, or asks for what cannot resume: a
            sampler, an iterable-style data set, ``in_order=False``.
    """

    def __init__(
        self,
        dataset: Dataset[Item],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        remainder: Remainder = "exact",
        global_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **torch_options: Any,
    ) -> None:
        _check_dataset(dataset)
        remainder = _check_options(torch_options, remainder)
        position = (_SeedingBatchSampler if torch_options.get("num_workers") else ElasticBatchSampler)(
            dataset,  # type: ignore[arg-type]  # _check_dataset took its length
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
        self._position = position
        self._iterator_number = 0

    @property
    def epoch(self) -> int:
        """The epoch of the position; at its end still that epoch."""
        return self._position.epoch

    @property
    def last_indices(self) -> list[int]:
        """The data set's indices of the batch that this rank received last."""
        return self._position.last_indices

    @property
    def num_padded(self) -> int:
        """How many of `last_indices`, its last ones, are repeats of items used before."""
        return self._position.num_padded

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        """Return the batches from the position on; in the next epoch, if this one is over."""
        self._iterator_number += 1
        batches = super().__iter__()
        # From here on the loop's batches say where the position is, not the workers'.
        self._position.advance(0)
        return self._count(batches, self._iterator_number)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: to its start, or if it is the present one, nowhere.

        Raises:
            ConfigError: If it is no epoch number.
        """
        self._iterator_number += 1
        self._position.set_epoch(epoch)

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
        self._iterator_number += 1
        self._position.load_state_dict(state)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise what `load_state_dict` would, changing nothing."""
        saved, _ = decode_cursor(state)
        check_same_data(saved, self._position.cursor)

    def _count(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
        # Asked for at once: workers begin to fetch when the iterator is made.
        for batch in batches:
            if number != self._iterator_number:
                raise RuntimeError(
                    "this iterator of a raycheck.DataLoader is out of date: the loader was iterated anew, or "
                    "moved by set_epoch or load_state_dict; one iterator at a time is the position in the data"
                )
            self._position.advance()
            yield batch

    def _get_iterator(self) -> Any:
        # Only torch's iterator sees the wrapped data set; ``loader.dataset`` is the user's.
        given = self.dataset
        if self.num_workers:
            object.__setattr__(self, "dataset", _SeededDataset(given))
        try:
            return super()._get_iterator()
        finally:
            object.__setattr__(self, "dataset", given)


class _SeedingBatchSampler(ElasticBatchSampler):
    """Gives out batches with the seed of their random draws in front, for `_SeededDataset`."""

    def __iter__(self) -> Iterator[list[int]]:
        self._begin()
        cursor = self._rest.cursor
        return (
            [batch_seed(cursor.seed, cursor.epoch, positions.start), *items]
            for positions, items in self._produce()
        )


class _SeededDataset(Dataset[Any]):
    """A data set in a worker process that seeds the generators before each batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        # Code in the worker that looks at its data set finds what it knows.
        return getattr(self.__dict__["_dataset"], name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, batch: list[int]) -> list[Any]:
        seed, *indices = batch
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        fetch = getattr(self._dataset, "__getitems__", None)
        if callable(fetch):
            return list(fetch(indices))
        return [self._dataset[index] for index in indices]


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        refuse(
            "dataset",
            dataset,
            "map-style, with a length and items by index: an iterable-style data set has no position that can be "
            "resumed; give it state_dict and load_state_dict, and pass it to attach() beside a plain torch DataLoader",
        )
    if not hasattr(dataset, "__len__"):
        refuse("dataset", dataset, "a data set with a length, since every item is counted once per epoch")


def _check_options(options: dict[str, Any], remainder: Remainder) -> Remainder:
    for name in ("sampler", "batch_sampler"):
        if options.pop(name, None) is not None:
            refuse(name, "...", OWN_ORDER)
    if not options.get("in_order", True):
        refuse(
            "in_order", False, "True: batches that overtake each other have no position that can be resumed"
        )
    if options.pop("drop_last", False):
        if remainder == "pad":
            refuse("drop_last", True, 'left out where remainder="pad" is given')
        return "drop"
    return remainder
