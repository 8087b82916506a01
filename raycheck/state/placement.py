"""Where each tensor of a layout goes in the arena, and the cheapest way to copy it there."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from raycheck.core.layout import Chunk, ShardImage, shard_image
from raycheck.core.plan import TensorSpec, deal
from raycheck.state.live import Acquaintance, Live
from raycheck.state.spans import SMALL_BYTES, Addresses, as_addresses

VALUES = "values"
"""The entry that holds a rank's plain values, as JSON padded with spaces."""

Indices = npt.NDArray[np.intp]


class Placement:
    """One layout: made when a name, shape or dtype changes, used by every snapshot until then.

    Small chunks of one item size lie side by side, so that the step counters of
    an optimizer, hundreds of them, are gathered in one call.

    Args:
        live: The tensors.
        known: Their kinds.
        rank: Whose shard this is.
        world_size: Ranks among which shared tensors are dealt.
        keeps_per_rank: Store all tensors of this rank, dealing none.
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
        values_bytes: int,
    ) -> None:
        self._key = (known.names, known.kinds, known.num_shared)
        self._keeps_per_rank = keeps_per_rank
        self.values_bytes = values_bytes
        num_dealt = 0 if keeps_per_rank else live.num_shared
        specs = [_spec(name, tensor) for name, tensor in zip(live.names, live.tensors, strict=True)]
        chunks = list(deal(specs[:num_dealt], world_size)[rank])
        chunks += [dataclasses.replace(_whole(spec), owner=rank) for spec in specs[num_dealt:]]
        chunks.sort(key=lambda chunk: chunk.num_bytes < SMALL_BYTES)
        size = (self.values_bytes,)
        self.image: ShardImage = shard_image(
            [*chunks, Chunk(VALUES, "uint8", 1, size, (0,), size, rank)], rank=rank
        )
        self.values_begin = self.image.entries[-1].begin
        self.chunks = chunks

        index_of = {name: index for index, name in enumerate(live.names)}
        self.tensor_index: Indices = np.array([index_of[chunk.name] for chunk in chunks], dtype=np.intp)
        self.source_offset: Addresses = as_addresses([_source_offset(chunk) for chunk in chunks])
        self.begin: Addresses = as_addresses([entry.begin for entry in self.image.entries[:-1]])
        self.num_bytes: Addresses = as_addresses([chunk.num_bytes for chunk in chunks])
        self._ways: tuple[bytes, Way, Way] | None = None

    def fits(self, known: Acquaintance) -> bool:
        """Return whether this still is the layout of these tensors."""
        return (known.names, known.kinds, known.num_shared) == self._key

    def has_room(self, values_bytes: int, *, keeps_per_rank: bool) -> bool:
        """Return whether nothing but the tensors could ask for another layout."""
        return values_bytes <= self.values_bytes and keeps_per_rank == self._keeps_per_rank

    def ways(self, are_flat: npt.NDArray[np.bool_], may_wait: npt.NDArray[np.bool_]) -> tuple[Way, Way]:
        """Return how to copy what must be copied at once, and what may wait.

        Args:
            are_flat: Per tensor, whether its memory can be copied by address.
            may_wait: Per tensor.
        """
        key = are_flat.tobytes() + may_wait.tobytes()
        if self._ways is None or self._ways[0] != key:
            flat = are_flat[self.tensor_index]
            deferred = may_wait[self.tensor_index] & flat
            self._ways = key, self._way(~deferred, flat), self._way(deferred, flat)
        return self._ways[1], self._ways[2]

    def _way(self, chosen: npt.NDArray[np.bool_], flat: npt.NDArray[np.bool_]) -> Way:
        small = self.num_bytes < SMALL_BYTES
        has_bytes = self.num_bytes > 0
        gathered = np.flatnonzero(chosen & flat & small & has_bytes)
        gathered = gathered[np.argsort(self.begin[gathered])]
        ends = self.begin[gathered] + self.num_bytes[gathered]
        breaks = np.flatnonzero(ends[:-1] != self.begin[gathered][1:]) + 1
        return Way(
            large=np.flatnonzero(chosen & flat & ~small),
            runs=[run for run in np.split(gathered, breaks) if len(run)],
            other=np.flatnonzero(chosen & ~flat & has_bytes),
            flat=np.flatnonzero(chosen & flat & has_bytes),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How to copy some of a placement's chunks; all are indices of chunks."""

    large: Indices
    """One ``memcpy`` each."""

    runs: list[Indices]
    """Small ones that are neighbours in the arena: one ``pwritev`` each."""

    other: Indices
    """Not in host memory, or not contiguous: torch copies them."""

    flat: Indices
    """All that are copied by address."""


def rows_of(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return the part of a tensor that a chunk is, as a view."""
    if chunk.shape == tuple(tensor.shape):
        return tensor
    return tensor[chunk.offset[0] : chunk.offset[0] + chunk.shape[0]]


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tensor.element_size(), tuple(tensor.shape))


def _whole(spec: TensorSpec) -> Chunk:
    return spec.rows(0, spec.shape[0] if spec.shape else 1)


def _source_offset(chunk: Chunk) -> int:
    if not chunk.offset or not chunk.offset[0]:
        return 0
    return chunk.offset[0] * (chunk.num_bytes // chunk.shape[0])
