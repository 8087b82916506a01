"""Canaries: a few bytes of every tensor, by which a torn copy is known.

Versions alone do not do. They move after the write, so a copier can miss it;
fused optimizers never move them, nor do writes through NumPy or ``.data``. The
same bytes are looked at three times: live when the snapshot begins, then live
and copied at the verdict. All three are the same unless the tensor was written
to before, while or after it was copied.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raycheck.state.spans import Addresses, Peek, Scratch

CANARY_BYTES = 64
_NUM_PLACES = 17


class Canaries:
    """The canaries of one snapshot.

    Any dense update changes them. Their place moves from snapshot to snapshot,
    so that an update of some rows alone is found sooner or later too.

    Args:
        sources: Live addresses; the memory must outlive this object.
        num_bytes: Bytes of each tensor, more than 0.
        plan_id: Decides the place.
        scratch: Used for reading, by one thread at a time.
    """

    def __init__(self, sources: Addresses, num_bytes: Addresses, plan_id: int, scratch: Scratch) -> None:
        self._lengths = np.minimum(num_bytes, np.uint64(CANARY_BYTES))
        place = np.uint64(plan_id * 7 % _NUM_PLACES)
        at = (num_bytes - self._lengths) * place // np.uint64(_NUM_PLACES - 1)
        # Where a line of the processor's cache begins, if the tensor does: half of what must be fetched.
        self._at = at // np.uint64(CANARY_BYTES) * np.uint64(CANARY_BYTES)
        self._sources = sources
        self._peek = Peek.of(sources + self._at, self._lengths)
        """For live memory; None where only the kernel can look at it."""

        # A copy: the scratch is used again.
        self._before = self._take(self._peek, sources, scratch).copy()

    def differing(self, starts: Addresses, scratch: Scratch) -> list[int]:
        """Return the indices of those whose canaries are not what they were at first.

        Args:
            starts: Where each tensor is, or its copy. All of it must be mapped.
            scratch: As above.
        """
        return self._differing(Peek.of(starts + self._at, self._lengths), starts, scratch)

    def changed(self, scratch: Scratch) -> list[int]:
        """Return the indices of those that have changed in live memory."""
        return self._differing(self._peek, self._sources, scratch)

    def _differing(self, peek: Peek | None, starts: Addresses, scratch: Scratch) -> list[int]:
        differs = self._take(peek, starts, scratch) != self._before
        if not differs.any():
            return []
        owners = np.searchsorted(np.cumsum(self._lengths), np.flatnonzero(differs), side="right")
        return [int(index) for index in np.unique(owners)]

    def _take(self, peek: Peek | None, starts: Addresses, scratch: Scratch) -> npt.NDArray[np.uint8]:
        if peek is not None:
            return peek.take()
        # An array: equal memoryviews are compared byte by byte, in half a millisecond.
        return np.frombuffer(scratch.take(starts + self._at, self._lengths), np.uint8)
