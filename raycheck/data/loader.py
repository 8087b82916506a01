"""``raycheck.DataLoader``: torch's, with a position that is saved, restored and resized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset

from raycheck.core.cursor import Remainder, batch_seed
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
        remainder = _check_options(torch_options, batch_size, shuffle, remainder)
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
        self._last = (position.epoch, range(0))
        self._iterator_number = 0
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        """Return the batches from the position on; in the next epoch, if this one is over."""
        self._iterator_number += 1
        self._has_ended = False
        return _Batches(self, self._start(), self._iterator_number)
