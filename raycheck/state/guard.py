"""The second line of a snapshot's defence: telling whether what is being copied has changed meanwhile.

The first is the optimizer's hook, which waits for the copy. What bypasses it is
known by three things: versions, canaries, and where memory is.
"""

from __future__ import annotations

import torch

from raycheck.state.canary import Canaries
from raycheck.state.held import HeldMemory, differing
from raycheck.state.live import versions_of
from raycheck.state.spans import Addresses, Scratch


class Guard:
    """Guards the tensors of one snapshot that are copied while training goes on.

    It keeps their memory alive. Tensors go by their positions in the list.

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
        self._versions = versions_of(tensors)
        self._memory = HeldMemory(tensors, sources, num_bytes)
        self._canaries = Canaries(sources, num_bytes, plan_id, scratch)

    def missing(self) -> list[int]:
        """Return those whose memory has been given up. For the copying thread, before it copies by address."""
        return self._memory.missing()

    def differing(self, copies: Addresses, scratch: Scratch) -> list[int]:
        """Return those whose copies, at these addresses, are not what was there when this was made."""
        return self._canaries.differing(copies, scratch)

    def changed(self, scratch: Scratch) -> list[int]:
        """Return those that have changed, or lost their memory. For the training thread, after `missing`."""
        moved = self._memory.moved()
        if moved:
            # Nobody may look at their canaries.
            return moved
        torn = {*self._canaries.changed(scratch), *differing(versions_of(self._tensors), self._versions)}
        return sorted(torn)
