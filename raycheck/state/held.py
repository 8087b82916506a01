"""Memory that is read by address while training goes on."""

from __future__ import annotations

import torch

from raycheck.state.spans import Addresses, as_addresses


class HeldMemory:
    """Keeps memory alive, also where a parameter's ``.data`` is replaced meanwhile, and tells if it is given up.

    Args:
        tensors: Whose memory it is; they go by their positions.
        addresses: Of what is read of the first ones. The others are only held.
        num_bytes: Bytes of what is read of those.
    """

    def __init__(self, tensors: list[torch.Tensor], addresses: Addresses, num_bytes: Addresses) -> None:
        self._storages = list(map(torch.Tensor.untyped_storage, tensors))
        self._addresses, self._num_bytes = addresses, num_bytes
        self._seen_at: list[int] = []

    def missing(self) -> list[int]:
        """Return those whose memory has been given up, as by ``resize_(0)`` of a storage: it must not be read.

        Called by the reading thread, before it reads.
        """
        read = self._storages[: len(self._addresses)]
        self._seen_at = self._places()
        starts = as_addresses(self._seen_at[: len(read)])
        ends = starts + as_addresses([storage.nbytes() for storage in read])
        is_outside = (self._addresses < starts) | (self._addresses + self._num_bytes > ends)
        return [int(position) for position in is_outside.nonzero()[0]]

    def moved(self) -> list[int]:
        """Return those whose memory has been given up since `missing`."""
        return differing(self._places(), self._seen_at)

    def _places(self) -> list[int]:
        return list(map(torch.UntypedStorage.data_ptr, self._storages))


def differing(now: list[int], then: list[int]) -> list[int]:
    """Return the positions at which two lists of one length differ."""
    if now == then:
        return []
    return [position for position, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
