"""Where each tensor of a layout goes in the arena, and the cheapest way to copy it there."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raycheck.core.layout import VALUES, Chunk, ShardImage, shard_image
from raycheck.core.plan import TensorSpec, deal
from raycheck.state.live import Acquaintance, Live
from raycheck.state.spans import PEEK_BYTES, SMALL_BYTES, TINY_BYTES, Addresses, as_addresses

Indices = npt.NDArray[np.intp]

AT_ONCE_BYTES = PEEK_BYTES
"""Up to this, to copy a tensor costs the training thread less than to guard it: versions and canaries, twice."""

_SIZE_CLASSES = TINY_BYTES, PEEK_BYTES, SMALL_BYTES - 1
"""Chunks of up to so many bytes lie together, the large ones first."""


class Placement:
    """One layout: made when a name, shape or dtype changes, used by every snapshot until then.

    Small chunks of one item size lie side by side, so that the step counters of
    an optimizer, hundreds of them, are gathered in one call. The smallest are
    always copied at once, and lie together for that.

    Args:
        live: The tensors.
        known: Their kinds.
        rank: Whose shard this is.
        world_size: Ranks among which shared tensors are dealt.
        keeps_per_rank: Store all tensors of this rank, dealing none.
        spared: Ranks that are dealt nothing, as long as others are left.
        values_bytes: Room for the plain values.
    """

    def __init__(
        self,
        live: Live,
        known: Acquaintance,
        *,
        rank: int,
        world_size: int,
        keeps_per_rank: bool,
        spared: frozenset[int],
        values_bytes: int,
    ) -> None:
        self._key = _key_of(known)
        self._dealing = keeps_per_rank, spared
        self.values_bytes = values_bytes
        specs = [_spec(name, tensor) for name, tensor in zip(live.names, live.tensors, strict=True)]
        first_own = live.num_shared + len(live.pieces)
        shared, held, own = specs[: live.num_shared], specs[live.num_shared : first_own], specs[first_own:]
        if keeps_per_rank:
            shared, own = [], [*shared, *own]
        chunks = list(deal(shared, world_size, spared)[rank])
        shares = [piece.share(spec) for piece, spec in zip(live.pieces, held, strict=True)]
        chunks += [share for share in shares if share is not None]
        chunks += [dataclasses.replace(_whole(spec), owner=rank) for spec in own]
        chunks.sort(key=lambda chunk: -_size_class(chunk.num_bytes))
        size = (self.values_bytes,)
        self.image: ShardImage = shard_image(
            [*chunks, Chunk(VALUES, "uint8", 1, size, (0,), size, rank)], rank=rank
        )
        self.values_begin = self.image.entries[-1].begin
        self.chunks = chunks

        index_of = {name: index for index, name in enumerate(live.names)}
        self.tensor_index: Indices = np.array([index_of[chunk.name] for chunk in chunks], dtype=np.intp)
        base_of = {spec.name: piece.first_row for piece, spec in zip(live.pieces, held, strict=True)}
        self.first_row = [_first_row(chunk) - base_of.get(chunk.name, 0) for chunk in chunks]
        """Per chunk, which row of the tensor in memory it begins with."""

        self.source_offset: Addresses = as_addresses(
            [row * _row_bytes(chunk) for row, chunk in zip(self.first_row, chunks, strict=True)]
        )
        self.begin: Addresses = as_addresses([entry.begin for entry in self.image.entries[:-1]])
        self.num_bytes: Addresses = as_addresses([chunk.num_bytes for chunk in chunks])

    def fits(self, known: Acquaintance) -> bool:
        """Return whether this still is the layout of these tensors."""
        return _key_of(known) == self._key

    def has_room(self, values_bytes: int, *, keeps_per_rank: bool, spared: frozenset[int]) -> bool:
        """Return whether nothing but the tensors could ask for another layout."""
        return values_bytes <= self.values_bytes and self._dealing == (keeps_per_rank, spared)

    def ways(
        self,
        are_flat: npt.NDArray[np.bool_],
        may_wait: npt.NDArray[np.bool_],
        on_device: npt.NDArray[np.bool_],
    ) -> tuple[Way, Way]:
        """Return how to copy what must be copied at once, and what may wait.

        Args:
            are_flat: Per tensor, whether its memory can be copied by address.
            may_wait: Per tensor.
            on_device: Per tensor, whether a device copies it.
        """
        device = on_device[self.tensor_index]
        flat = are_flat[self.tensor_index] & ~device
        deferred = may_wait[self.tensor_index] & (flat & (self.num_bytes > AT_ONCE_BYTES) | device)
        return self._way(~deferred, flat, device), self._way(deferred, flat, device)

    def _way(
        self,
        chosen: npt.NDArray[np.bool_],
        flat: npt.NDArray[np.bool_],
        device: npt.NDArray[np.bool_],
    ) -> Way:
        small = self.num_bytes < SMALL_BYTES
        has_bytes = self.num_bytes > 0
        gathered = np.flatnonzero(chosen & flat & small & has_bytes)
        gathered = gathered[np.argsort(self.begin[gathered])]
        begin, num_bytes = self.begin[gathered], self.num_bytes[gathered]
        are_apart = begin[:-1] + num_bytes[:-1] != begin[1:]
        classes = np.searchsorted(_SIZE_CLASSES, num_bytes)
        breaks = np.flatnonzero(are_apart | (classes[:-1] != classes[1:])) + 1
        return Way(
            large=np.flatnonzero(chosen & flat & ~small),
            runs=[run for run in np.split(gathered, breaks) if len(run)],
            other=np.flatnonzero(chosen & ~flat & ~device & has_bytes),
            device=np.flatnonzero(chosen & device & has_bytes),
            flat=np.flatnonzero(chosen & flat & has_bytes),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How to copy some of a placement's chunks; all are indices of chunks."""

    large: Indices
    """One ``memcpy`` each."""

    runs: list[Indices]
    """Small ones that are neighbours in the arena and of one size class: one call each."""

    other: Indices
    """Not contiguous, or in no memory that anyone knows how to copy: torch copies them."""

    device: Indices
    """In device memory: copied by the device, in the order of its own work."""

    flat: Indices
    """All that are copied by address."""


def _key_of(known: Acquaintance) -> tuple[Any, ...]:
    return known.names, known.kinds, known.num_shared, known.pieces


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tensor.element_size(), tuple(tensor.shape))


def _size_class(num_bytes: int) -> int:
    """Return which chunks belong together, the large ones last."""
    return bisect.bisect_left(_SIZE_CLASSES, num_bytes)


def _whole(spec: TensorSpec) -> Chunk:
    return spec.rows(0, spec.shape[0] if spec.shape else 1)


def _first_row(chunk: Chunk) -> int:
    return chunk.offset[0] if chunk.offset else 0


def _row_bytes(chunk: Chunk) -> int:
    return chunk.num_bytes // chunk.shape[0] if chunk.shape and chunk.shape[0] else 0
