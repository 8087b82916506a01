"""The second line of a snapshot's defence: telling whether what is being copied has changed meanwhile.

The first is the optimizer's hook, which waits for the copy. What bypasses it is
known by three things: versions, canaries, and where memory is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from raycheck.state.canary import Canaries
from raycheck.state.live import versions_of
from raycheck.state.spans import Addresses, Scratch, as_addresses


class Guard:
    """Guards the tensors of one snapshot that are copied while training goes on.

    It keeps their memory alive, also where a parameter's ``.data`` is replaced
    meanwhile. Tensors go by their positions in the list.

    Args:
        tensors: Those that are copied by address come first.
        sources: Addresses of what is copied of those.
        num_bytes: Bytes of what is copied of those, more than 0.
        plan_id: Decides where the canaries are.
        scratch: For reading, in this thread.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        sources: Addresses,
        num_bytes: Addresses,
        *,
        plan_id: int,
        scratch: Scratch,
    ) -> None:
        self._tensors = tensors
        self._sources, self._num_bytes = sources, num_bytes
        self._versions = versions_of(tensors)
        self._memory = list(map(torch.Tensor.untyped_storage, tensors))
        self._memory_at: list[int] = []
        self._canaries = Canaries(sources, num_bytes, plan_id, scratch)

    def missing(self) -> list[int]:
        """Return those whose memory has been given up, as by ``resize_(0)`` of a storage: it must not be read.

        Called by the copying thread, before it copies by address.
        """
        self._memory_at = _addresses_of(self._memory)
        starts = as_addresses(self._memory_at[: len(self._sources)])
        ends = starts + as_addresses([storage.nbytes() for storage in self._memory[: len(self._sources)]])
        is_outside = (self._sources < starts) | (self._sources + self._num_bytes > ends)
        return [int(position) for position in np.flatnonzero(is_outside)]

    def differing(self, copies: Addresses, scratch: Scratch) -> list[int]:
        """Return those whose copies, at these addresses, are not what was there when this was made."""
        return self._canaries.differing(copies, scratch)

    def changed(self, scratch: Scratch) -> list[int]:
        """Return those that have changed, or lost their memory. For the training thread, after `missing`."""
        moved = _differing(_addresses_of(self._memory), self._memory_at)
        if moved:
            # Nobody may look at their canaries.
            return moved
        torn = {*self._canaries.changed(scratch), *_differing(versions_of(self._tensors), self._versions)}
        return sorted(torn)


def _addresses_of(memory: Sequence[torch.UntypedStorage]) -> list[int]:
    return list(map(torch.UntypedStorage.data_ptr, memory))


def _differing(now: list[int], then: list[int]) -> list[int]:
    if now == then:
        return []
    return [position for position, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
