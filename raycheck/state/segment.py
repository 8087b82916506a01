"""A worker's shared memory: control page and arena in one memory file.

`memfd_create`, not ``/dev/shm``: that has 64 MB in a Kubernetes pod by
default, and its files outlive their process. This memory is freed with its
last descriptor, however the processes end.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from raycheck.core.page import PAGE_BYTES, ControlPage
from raycheck.errors import StateError

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Segment:
    """The worker's side of the segment. The agent holds only the descriptor.

    The arena begins ``arena_offset`` bytes into the file.

    Args:
        budget_bytes: The most that the arena may take; None: as much as it needs.
        fd: Of the segment of a worker that is gone, to go on with: its memory is
            made already, and its arena keeps what is in it. Closed by `close`.
    """

    arena_offset = PAGE_BYTES

    def __init__(self, *, budget_bytes: int | None = None, fd: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.fd = _make_file() if fd is None else fd
        self._page_map = self._map(PAGE_BYTES, offset=0)
        # The plan and the steps of a former worker are not this one's.
        self._page_map[:] = bytes(PAGE_BYTES)
        self.page = ControlPage(memoryview(self._page_map))
        self._arena_map: mmap.mmap | None = None
        self.arena_bytes = 0
        self._is_touched = False
        self.address = 0
        """Where the arena begins in this process."""

        num_bytes = os.fstat(self.fd).st_size - PAGE_BYTES
        if num_bytes > 0:
            self._map_arena(num_bytes)

    def check(self, num_bytes: int) -> None:
        """Say whether an arena of this size is allowed.

        Raises:
            StateError: If it exceeds the budget. Attributes: ``needed_bytes``, ``allowed_bytes``.
        """
        if self.budget_bytes is not None and num_bytes > self.budget_bytes:
            raise StateError(
                f"a snapshot needs {num_bytes} bytes of shared memory, and this rank may take "
                f"{self.budget_bytes}: its share of what the node or its memory limit leaves free; "
                "train with fewer ranks on each node, shard the state further, or raise the limit",
                needed_bytes=num_bytes,
                allowed_bytes=self.budget_bytes,
            )

    def ensure(self, num_bytes: int) -> None:
        """Make the arena at least this large; its content may be lost. Returns at once.

        Raises:
            StateError: If it exceeds the budget; nothing has changed.
            OSError: If the memory cannot be had.
        """
        if num_bytes <= self.arena_bytes:
            return
        self.check(num_bytes)
        os.ftruncate(self.fd, PAGE_BYTES + num_bytes)
        self._map_arena(num_bytes)

    def _map_arena(self, num_bytes: int) -> None:
        # The old mapping goes when its last user does.
        self._arena_map = self._map(num_bytes, offset=PAGE_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._arena_map))
        self.arena_bytes = num_bytes
        self._is_touched = False

    def touch(self) -> bool:
        """Have the arena's pages made, if they are not: one call is cheaper than a fault for each.

        Blocks, at some GB/s, without the interpreter lock; so it belongs into
        a thread. A kernel that does not know this makes pages as they are
        written. Returns True if this call was the first since `ensure`.
        """
        # Held, since the training thread may replace the mapping meanwhile.
        arena, address, num_bytes = self._arena_map, self.address, self.arena_bytes
        if self._is_touched or arena is None:
            return False
        _libc.madvise(address, num_bytes, _POPULATE_WRITE)
        self._is_touched = self._arena_map is arena
        return self._is_touched

    @property
    def arena(self) -> memoryview:
        """The arena's bytes, writable."""
        return memoryview(self._arena_map) if self._arena_map is not None else memoryview(bytearray())

    def close(self) -> None:
        """Give up descriptor and arena. The memory goes with the last mapping and descriptor.

        The control page stays readable for as long as this object lives.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._arena_map, self.arena_bytes, self.address = None, 0, 0

    def _map(self, num_bytes: int, *, offset: int) -> mmap.mmap:
        mapping = mmap.mmap(self.fd, num_bytes, mmap.MAP_SHARED, offset=offset)
        # An orphaned data-loader process must not keep the memory.
        mapping.madvise(mmap.MADV_DONTFORK)
        return mapping


def _make_file() -> int:
    fd = os.memfd_create("raycheck", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE_BYTES)
    # The agent maps it, and reading what was cut off would end the agent with SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd
