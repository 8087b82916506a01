"""Copying the chunks of one placement from live tensors into an arena."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from raycheck.state.live import Acquaintance
from raycheck.state.placement import Placement, Way
from raycheck.state.segment import Segment
from raycheck.state.spans import PEEK_BYTES, Addresses, Peek, copy_span, gather


class Copying:
    """Which chunks are copied at once and which may wait, from where, and the cheapest way for each.

    Made anew when a tensor has moved, or others may wait; used by every
    snapshot until then. Holds no tensor.

    Args:
        placement: Where the chunks go.
        known: The tensors' addresses and kinds.
        may_wait: Per tensor, whether it may be copied while training goes on.
        on_device: Per tensor, whether a device copies it.
    """

    def __init__(
        self,
        placement: Placement,
        known: Acquaintance,
        may_wait: npt.NDArray[np.bool_],
        on_device: npt.NDArray[np.bool_],
    ) -> None:
        self.placement, self.known, self._may_wait = placement, known, may_wait
        self.at_once, self.deferred = placement.ways(known.are_flat, may_wait & known.are_tracked, on_device)
        self.sources: Addresses = known.addresses[placement.tensor_index] + placement.source_offset
        """Per chunk. Of no use where the tensor is not flat."""

        self.guarded = np.concatenate([self.deferred.flat, self.deferred.device])
        """Chunks that training may change while they are copied: those copied by address come first."""

        self._peeks = [self._peek(run) for run in self.at_once.runs]

    def is_for(self, placement: Placement, known: Acquaintance, may_wait: npt.NDArray[np.bool_]) -> bool:
        """Return whether this was made for just these."""
        return placement is self.placement and known is self.known and may_wait is self._may_wait

    def tensors(self, live: list[torch.Tensor], chunks: npt.NDArray[np.intp]) -> list[torch.Tensor]:
        """Return the tensor of each of these chunks."""
        return list(map(live.__getitem__, self.placement.tensor_index[chunks].tolist()))

    def copy_at_once(self, live: list[torch.Tensor], segment: Segment) -> None:
        """Copy what must not wait and is in host memory. For the training thread."""
        self._copy_large(self.at_once, segment)
        for run, peek in zip(self.at_once.runs, self._peeks, strict=True):
            if peek is None:
                self._gather(run, segment)
            else:
                begin = int(self.placement.begin[run[0]])
                peek.take(segment.arena[begin : begin + peek.num_bytes])
        other = self.at_once.other
        for index, tensor in zip(other.tolist(), self.tensors(live, other), strict=True):
            source, target = self.copy_of(index, tensor, segment)
            target.copy_(source)

    def copy_deferred(self, segment: Segment) -> None:
        """Copy what could wait and is in host memory. Keeps the interpreter lock for moments only.

        The memory must still be there.
        """
        self._copy_large(self.deferred, segment)
        for run in self.deferred.runs:
            self._gather(run, segment)

    def device_copies(
        self, live: list[torch.Tensor], way: Way, segment: Segment
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what a device copies: from where, and to where."""
        return [
            self.copy_of(index, tensor, segment)
            for index, tensor in zip(way.device.tolist(), self.tensors(live, way.device), strict=True)
        ]

    def copy_of(
        self, index: int, tensor: torch.Tensor, segment: Segment
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a chunk in its tensor, and its place in the arena."""
        placement, source = self.placement, tensor.detach()
        chunk = placement.chunks[index]
        if chunk.shape != tuple(source.shape):
            source = source.narrow(0, placement.first_row[index], chunk.shape[0])
        begin, num_bytes = int(placement.begin[index]), int(placement.num_bytes[index])
        window = segment.arena[begin : begin + num_bytes]
        return source, torch.frombuffer(window, dtype=source.dtype).view(source.shape)

    def _copy_large(self, way: Way, segment: Segment) -> None:
        for target, source, num_bytes in zip(
            self.placement.begin[way.large].tolist(),
            self.sources[way.large].tolist(),
            self.placement.num_bytes[way.large].tolist(),
            strict=True,
        ):
            copy_span(segment.address + target, source, num_bytes)

    def _gather(self, run: npt.NDArray[np.intp], segment: Segment) -> None:
        offset = segment.arena_offset + int(self.placement.begin[run[0]])
        gather(segment.fd, offset, self.sources[run], self.placement.num_bytes[run])

    def _peek(self, run: npt.NDArray[np.intp]) -> Peek | None:
        num_bytes = self.placement.num_bytes[run]
        return Peek.of(self.sources[run], num_bytes) if num_bytes[0] <= PEEK_BYTES else None


__all__ = ["Copying"]
