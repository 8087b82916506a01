"""Moving memory by address: the two ways that cost the training process least.

A large piece goes by one call of libc's ``memcpy``. Many small pieces go by
``pwritev``, which gathers up to a thousand of them into a memory file in one
system call. Neither holds the interpreter lock, and neither wakes a pool of
threads. Tensors of the library's own cost microseconds each; a row of an array
of addresses costs nanoseconds.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]

SMALL_BYTES = 64 << 10
"""Below this, the kernel's slower copy is cheaper than a call for each piece."""

PEEK_BYTES = 4 << 10
"""Up to this, the kernel's fixed costs for each piece are more than those of a list of its lines."""

TINY_BYTES = 64
"""Up to this, looking at it costs more than its bytes do."""

_MEMCPY_PIECE_BYTES = 16 << 20
_MAX_SPANS = 1024  # IOV_MAX
_WORD_BYTES = 4
_LINE_BYTES = 64

_libc = ctypes.CDLL(None, use_errno=True)
_memcpy = _libc.memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p
_pwritev = _libc.pwritev
_pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong)
_pwritev.restype = ctypes.c_ssize_t


def copy_span(target: int, source: int, num_bytes: int) -> None:
    """Copy memory between two addresses. Both must stay valid until it returns."""
    for at in range(0, num_bytes, _MEMCPY_PIECE_BYTES):
        _memcpy(target + at, source + at, min(_MEMCPY_PIECE_BYTES, num_bytes - at))


def gather(fd: int, offset: int, addresses: Addresses, lengths: Addresses) -> None:
    """Write pieces of this process's memory one after the other into a file.

    Args:
        fd: The file; it must be long enough already, if it is mapped.
        offset: Where the first piece goes.
        addresses: Where each piece begins.
        lengths: Its bytes.

    Raises:
        OSError: EFAULT if a piece is no longer mapped, ENOSPC or ENOMEM if the
            file's memory cannot be had. Part of the pieces may be written.
    """
    spans = np.stack([addresses, lengths], axis=1)
    for first in range(0, len(spans), _MAX_SPANS):
        offset = _write_spans(fd, offset, spans[first : first + _MAX_SPANS])


def _write_spans(fd: int, offset: int, spans: npt.NDArray[np.uint64]) -> int:
    """Write up to ``_MAX_SPANS`` spans and return the offset behind them."""
    ends = np.cumsum(spans[:, 1])
    total_bytes = int(ends[-1])
    done_bytes = 0
    while done_bytes < total_bytes:
        # A signal may cut a write short: go on in the middle of a span.
        first = int(np.searchsorted(ends, done_bytes, side="right"))
        rest = spans[first:].copy()
        skipped = done_bytes - (int(ends[first - 1]) if first else 0)
        rest[0] += np.array([skipped, -skipped]).astype(np.uint64)
        count = _pwritev(fd, rest.ctypes.data, len(rest), offset + done_bytes)
        if count <= 0:
            code = ctypes.get_errno() if count < 0 else errno.ENOSPC
            if code == errno.EINTR:
                continue
            raise OSError(code, os.strerror(code))
        done_bytes += count
    return offset + total_bytes


class Peek:
    """Pieces of this process's memory, to be copied one after the other by NumPy, any number of times.

    Takes a fraction of the time of `gather`: a processor has many loads under
    way here, and the kernel looks at each piece apart. All of the memory must
    be mapped: the process ends where it is not.
    """

    def __init__(self, addresses: Addresses, lengths: Addresses, unit_bytes: int) -> None:
        first = int(addresses.min())
        num_units = (int((addresses + lengths).max()) - first) // unit_bytes
        self._units: npt.NDArray[Any] = np.asarray(_Memory(first, num_units, unit_bytes))
        self._index = ((addresses - np.uint64(first)) // np.uint64(unit_bytes)).astype(np.intp)
        counts = (lengths // np.uint64(unit_bytes)).astype(np.intp)
        if (counts != 1).any():
            ends = np.cumsum(counts)
            self._index = np.repeat(self._index - (ends - counts), counts) + np.arange(ends[-1])

    @classmethod
    def of(cls, addresses: Addresses, lengths: Addresses) -> Peek | None:
        """Return a look at these pieces; None if one of them is not made of aligned words of four bytes.

        Fastest where all are made of aligned lines of 64 bytes.
        """
        if not len(addresses) or int(addresses.min()) < mmap.PAGESIZE:
            return None
        bits = int(np.bitwise_or.reduce(addresses | lengths))
        for unit_bytes in (_LINE_BYTES, _WORD_BYTES):
            if bits % unit_bytes == 0:
                return cls(addresses, lengths, unit_bytes)
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces together."""
        return len(self._index) * self._units.strides[0]

    def take(self, target: memoryview | None = None) -> npt.NDArray[np.uint8]:
        """Return what is there now: in ``target``, of as many bytes, or in memory of its own."""
        shape, dtype = (len(self._index), self._units.shape[1]), self._units.dtype
        out = np.empty(shape, dtype) if target is None else np.frombuffer(target, dtype).reshape(shape)
        # No index is out of bounds; without a mode NumPy would copy once more.
        return np.take(self._units, self._index, axis=0, out=out, mode="clip").reshape(-1).view(np.uint8)


class _Memory:
    """A range of this process's memory as rows of one unit each, for NumPy to look at."""

    def __init__(self, address: int, num_units: int, unit_bytes: int) -> None:
        word_bytes = min(unit_bytes, 8)
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": (num_units, unit_bytes // word_bytes),
            "typestr": f"<u{word_bytes}",
        }


class Scratch:
    """A small memory file that pieces are gathered into to be looked at."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("raycheck-scratch", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._num_bytes = 0

    def take(self, addresses: Addresses, lengths: Addresses) -> memoryview:
        """Return the pieces' bytes one after the other; valid until the next call.

        Raises:
            OSError: As `gather` does.
        """
        num_bytes = int(lengths.sum())
        if num_bytes == 0:
            return memoryview(b"")
        if num_bytes > self._num_bytes or self._map is None:
            os.ftruncate(self._fd, num_bytes)
            self._map = mmap.mmap(self._fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            self._num_bytes = num_bytes
        gather(self._fd, 0, addresses, lengths)
        return memoryview(self._map)[:num_bytes]

    def close(self) -> None:
        """Free the memory; what `take` returned keeps its own."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._map = -1, None


def as_addresses(values: Sequence[int]) -> Addresses:
    """Return ``values`` as an array of addresses or lengths."""
    return np.array(values, dtype=np.uint64)
