"""A worker's shared memory: control page and arena in one memory file.

`memfd_create`, not ``/dev/shm``: that has 64 MB in a Kubernetes pod by
default, and its files outlive their process. This memory is freed with its
last descriptor, however the processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from raycheck.core.page import PAGE_BYTES, ControlPage

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Segment:
    """The worker's side of the segment. The agent holds only the descriptor."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("raycheck", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, PAGE_BYTES)
        self._page_map = self._map(PAGE_BYTES, offset=0)
        self.page = ControlPage(memoryview(self._page_map))
        self._arena_map: mmap.mmap | None = None
        self.arena_bytes = 0
        self.address = 0
        """Where the arena begins in this process."""

    def ensure(self, num_bytes: int) -> None:
        """Make the arena at least this large and touch its pages; its content may be lost.

        Blocks for the first touch, at some GB/s.

        Raises:
            OSError: If the memory cannot be had.
        """
        if num_bytes <= self.arena_bytes:
            return
        os.ftruncate(self.fd, PAGE_BYTES + num_bytes)
        # The old mapping goes when its last user does.
        self._arena_map = self._map(num_bytes, offset=PAGE_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._arena_map))
        self.arena_bytes = num_bytes
        # Touched now, so that no snapshot pays for it; older kernels touch as they copy.
        with contextlib.suppress(OSError, ValueError):
            self._arena_map.madvise(_POPULATE_WRITE)

    @property
    def arena(self) -> memoryview:
        """The arena's bytes, writable."""
        return memoryview(self._arena_map) if self._arena_map is not None else memoryview(bytearray())

    def close(self) -> None:
        """Give up the descriptor. The memory goes with the last mapping and descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _map(self, num_bytes: int, *, offset: int) -> mmap.mmap:
        mapping = mmap.mmap(self.fd, num_bytes, mmap.MAP_SHARED, offset=offset)
        # An orphaned data-loader process must not keep the memory.
        mapping.madvise(mmap.MADV_DONTFORK)
        return mapping
