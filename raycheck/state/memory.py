"""How much memory a node has left, and how much of it snapshots may take.

Shared memory counts against the memory limit of the container that touches
it, so a limit is looked for at every level above this process. The free
memory of the machine alone would let a snapshot end in an out-of-memory kill.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

RESERVED_FRACTION = 0.5
"""Of the free memory, what snapshots leave for activations, data loading and the page cache."""

_UNLIMITED_BYTES = 1 << 60
"""Control groups of version 1 say "no limit" with a number near the end of the range."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeMemory:
    """What a node has left for this process and its siblings."""

    available_bytes: int
    """What the machine can still give without swapping."""

    limit_left_bytes: int | None
    """What the tightest limit above this process still allows; None without one."""

    @property
    def free_bytes(self) -> int:
        """What can be had by both."""
        limit_bytes = self.limit_left_bytes
        return self.available_bytes if limit_bytes is None else min(self.available_bytes, limit_bytes)


def snapshot_budget_bytes(
    memory: NodeMemory, *, num_ranks: int, reserved_fraction: float = RESERVED_FRACTION, held_bytes: int = 0
) -> int:
    """Return how much shared memory the arena of one rank may take.

    Pure. The node's ranks get equal shares, so that together they stay within
    what is free, whoever of them asks first.

    Args:
        memory: Read before any of these arenas was made.
        num_ranks: Ranks on this node.
        reserved_fraction: Part of the free memory that is left for activations,
            data loading and the page cache of the upload.
        held_bytes: Shared memory that this rank's arena has already, which
            ``memory`` no longer counts as free.

    Raises:
        ValueError: If a number is out of range.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: must be at least 1")
    if not 0 <= reserved_fraction < 1:
        raise ValueError(f"reserved_fraction={reserved_fraction}: must be from 0 to below 1")
    if held_bytes < 0:
        raise ValueError(f"held_bytes={held_bytes}: must not be negative")
    return int(memory.free_bytes * (1 - reserved_fraction)) // num_ranks + held_bytes


def read_node_memory(root: Path = Path("/")) -> NodeMemory:
    """Return the memory that is left, as the kernel says.

    Args:
        root: Where ``proc`` and ``sys`` are.

    Raises:
        OSError, ValueError: If ``/proc/meminfo`` cannot be read.
    """
    available_bytes = _meminfo_bytes(root / "proc/meminfo")
    limits = [left for left in _limits_left(root) if left is not None]
    return NodeMemory(available_bytes, min(limits) if limits else None)


def _meminfo_bytes(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no MemAvailable")


def _limits_left(root: Path) -> Iterator[int | None]:
    """Yield what each control group above this process still allows."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for folder in _folders(base, path):
            yield _left_bytes(folder, *names)


def _folders(base: Path, path: str) -> Iterator[Path]:
    """Yield a group's folder and those above it; a container may see its own as the root."""
    folder = base / path.strip("/")
    while folder != base and base in folder.parents:
        yield folder
        folder = folder.parent
    yield base


def _left_bytes(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Return what a group may still take. File cache that the kernel can drop does not count as taken."""
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= _UNLIMITED_BYTES:
            return None
        used_bytes = int((folder / usage_name).read_text())
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache_name:
                used_bytes -= int(value)
    return max(0, int(limit) - used_bytes)
