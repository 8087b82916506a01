"""Orders that a sampler of the user's own gives: drawn whole for each epoch, and the same whenever it is drawn again.

A sampler is code: nothing says that it gives the same order twice. So each
epoch's order is drawn with all generators seeded from seed and epoch, and a
saved position carries a digest of it, which the restored sampler must match.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import operator
import random
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
from torch.utils.data import DistributedSampler

from raycheck.core.cursor import batch_seed, refuse
from raycheck.errors import CheckpointMismatchError


class GivenOrder:
    """The orders of all epochs, as a sampler gives them. Its length counts entries.

    Args:
        field: "sampler", whose entries are items of the data set, or
            "batch_sampler", whose entries are lists of them.
        sampler: Iterable, with a length that is the same in every epoch. Gives
            the same on every rank. Is told the epoch where it has ``set_epoch``.
        seed: Of the draws that it makes.
        num_items: Of the data set.

    Raises:
        ConfigError: If it cannot give an order that all ranks share.
    """

    def __init__(self, field: str, sampler: Iterable[Any], *, seed: int, num_items: int) -> None:
        self._field = field
        self._sampler = sampler
        self._seed = seed
        self._num_items = num_items
        for part in (sampler, getattr(sampler, "sampler", None)):
            if isinstance(part, DistributedSampler):
                self._refuse(
                    "left out: it gives the part of one rank, and raycheck.DataLoader deals the items to the ranks "
                    "itself; shuffle=True gives another order in every epoch"
                )
        if isinstance(sampler, Iterator) or not hasattr(sampler, "__len__"):
            self._refuse("something with a length that can be iterated anew for every epoch")
        self._length = len(sampler)  # type: ignore[arg-type]  # it has one
        self._generators = [
            (generator, generator.initial_seed())
            for part in (sampler, getattr(sampler, "sampler", None))
            if isinstance(generator := getattr(part, "generator", None), torch.Generator)
        ]
        self._drawn: tuple[int, Entries] | None = None

    def __len__(self) -> int:
        return self._length

    def draw(self, epoch: int) -> Entries:
        """Return an epoch's order. Iterates the sampler, unless it did for this epoch last.

        Raises:
            ConfigError: If it gives another number of entries than its length, or
                one that is not in the data set.
        """
        if self._drawn is None or self._drawn[0] != epoch:
            tell = getattr(self._sampler, "set_epoch", None)
            if callable(tell):
                tell(epoch)
            for generator, first_seed in self._generators:
                generator.manual_seed(batch_seed(first_seed, epoch, 0))
            with _seeded(batch_seed(self._seed, epoch, 0)):
                entries = list(self._sampler)
            self._drawn = epoch, self._check(epoch, entries)
        return self._drawn[1]

    def check_drawn_alike(self, epoch: int, digest: object) -> None:
        """Check that an epoch's order is the one that a digest was made of.

        Raises:
            CheckpointMismatchError: If it is another.
        """
        given = self.draw(epoch).digest
        if isinstance(digest, str) and digest == given:
            return
        name = type(self._sampler).__name__
        raise CheckpointMismatchError(
            f"{self._field}={name}: "
            + (
                "the checkpoint was saved without one"
                if digest is None
                else f"gives another order for epoch {epoch} than when the checkpoint was saved"
            )
            + ", so that its position would mean other items. Pass the sampler that it was saved with; one that "
            "draws at random must draw from the generators of Python, NumPy or torch, or from a torch.Generator "
            "in its attribute `generator`, all of which are seeded for each epoch, or by the epoch that "
            "set_epoch() tells it",
            field=self._field,
            saved=digest,
            given=given,
        )

    def _check(self, epoch: int, entries: list[Any]) -> Entries:
        if len(entries) != self._length:
            self._refuse(
                f"one with as many entries in every epoch as its length says: it gave {len(entries)} in epoch "
                f"{epoch} and says {self._length}"
            )
        is_batched = self._field == "batch_sampler"
        try:
            flat = [item for entry in entries for item in entry] if is_batched else entries
            sizes = [len(entry) for entry in entries] if is_batched else []
            items = np.array([operator.index(item) for item in flat], np.int64)
        except (TypeError, OverflowError):
            what = "lists of indices of items" if is_batched else "indices of items, which are whole numbers"
            self._refuse(f"one that gives {what}")
        if 0 in sizes:
            self._refuse(
                f"one that gives no empty batch; its batch {sizes.index(0)} in epoch {epoch} is empty"
            )
        outside = items[(items < 0) | (items >= self._num_items)]
        if outside.size:
            self._refuse(
                f"one whose indices are from 0 to {self._num_items - 1}, those of the data set; it gave {outside[0]}"
            )
        return Entries(items, np.cumsum([0, *sizes], dtype=np.int64) if is_batched else None)

    def _refuse(self, allowed: str) -> NoReturn:
        refuse(self._field, type(self._sampler).__name__, allowed)


@dataclasses.dataclass(frozen=True)
class Entries:
    """One epoch's order. Takes 8 bytes for each item, and 8 for each batch."""

    items: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64] | None
    """Entry n is ``items[bounds[n] : bounds[n + 1]]``. None: each item is an entry."""

    @functools.cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that say whether another order is this one."""
        parts = hashlib.blake2b(self.items.tobytes(), digest_size=8)
        parts.update(b"" if self.bounds is None else self.bounds.tobytes())
        return parts.hexdigest()

    def at(self, positions: range) -> list[int]:
        """Return the items of the entries at some positions; behind the last one they start over."""
        found: list[int]
        if self.bounds is None:
            found = self.items.take(positions, mode="wrap").tolist()
            return found
        found = []
        for position in positions:
            entry = position % (len(self.bounds) - 1)
            found += self.items[self.bounds[entry] : self.bounds[entry + 1]].tolist()
        return found


def check_alone(field: str, others: dict[str, tuple[Any, Any]]) -> None:
    """Check that what a sampler decides is not given beside it.

    Args:
        field: "sampler" or "batch_sampler".
        others: What is given and the default, by name.

    Raises:
        ConfigError: If it is; names the other field.
    """
    for name, (value, default) in others.items():
        if value != default:
            refuse(name, value, f"left out where {field} is given, which decides it")


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch (CPU); put them back as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
