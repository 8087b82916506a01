"""A worker as its agent sees it, what it has staged, and what it leaves behind."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import mmap
import os
import threading
import time
from typing import Any

from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.page import PAGE_BYTES, ControlPage, Plan
from raycheck.runtime import messages, wire
from raycheck.store.upload import Mapping

MAX_SLOTS = 2
_NUM_ENDED_KNOWN = 8


class Upload:
    """One shard on its way to storage, out of one of its worker's arenas."""

    def __init__(self, plan: Plan, ref: CheckpointRef, num_bytes: int, *, slot: int = 0) -> None:
        self.plan = plan
        self.slot = slot
        self.ref = ref
        self.num_bytes = num_bytes
        self.started_s = time.monotonic()
        self.cancelled = threading.Event()
        self.num_bytes_done = 0
        self.keys: list[str] = []
        self.is_durable = False
        """Told to the coordinator, which may commit it: from then on it is not this agent's to delete."""

    def add_progress(self, num_bytes: int) -> None:
        """Count bytes sent; for people, so a lost update between threads does not matter."""
        self.num_bytes_done += num_bytes


class ConnectedWorker:
    """One worker as its agent sees it: connection, descriptors, control page.

    The page is in the first of its segments. Each of them has an arena, a slot
    for one snapshot.
    """

    def __init__(self, connection: wire.Connection, fd: int, hello: dict[str, Any]) -> None:
        self.connection = connection
        self.fds = [fd]
        """Of its segments; empty once it has been let go."""

        self.mappings = [Mapping() for _ in range(MAX_SLOTS)]
        """Of its segments, for stores that are written to from memory."""

        self.rank: int = hello["rank"]
        self.world_size: int = hello["world_size"]
        self.generation = GenerationId(*hello["generation"])
        self.has_joined: bool = hello["has_joined"]
        self._page_map = mmap.mmap(fd, PAGE_BYTES)
        self.page = ControlPage(memoryview(self._page_map))
        self.table: messages.TableChanged | None = None
        self.num_records_seen = 0
        self.uploads: dict[int, Upload] = {}
        """By plan id, the oldest first."""

        self.ended: collections.deque[Plan] = collections.deque(maxlen=_NUM_ENDED_KNOWN)
        """Plans whose attempts have ended of late: what is told of one late begins nothing."""

        self.is_connected = True
        self.has_closed = False
        """Its training function has ended well: nobody comes after it."""

        self.adopted: tuple[CheckpointRef, int] | None = None
        """The checkpoint and rank whose shard its arena held when it came, if checksums agree."""

        self.stored: dict[int, CheckpointRef] = {}
        """What each arena held when it was last stored."""

        self.offered: tuple[CheckpointRef | None] | None = None
        """The newest offer; None: this agent has passed none on."""

        self.reported: messages.RestoreReported | None = None
        """How the newest offer went; None: not known yet."""

        self.decided: tuple[CheckpointRef | None] | None = None
        """What all ranks load; None: not known yet."""

    @property
    def fd(self) -> int:
        """The descriptor of its first segment."""
        return self.fds[0]

    @property
    def upload(self) -> Upload | None:
        """The newest upload."""
        return next(reversed(self.uploads.values()), None)

    @property
    def is_let_go(self) -> bool:
        """Whether page and descriptors have been given up."""
        return not self.fds

    def let_go(self) -> None:
        """Give up page and descriptors; with them goes the last hold on the memory."""
        self.page.release()
        self._page_map.close()
        for fd in self.fds:
            os.close(fd)
        # An upload that is under way has its own hold on both.
        self.fds, self.mappings = [], []

    def newest_stored(self) -> tuple[int, CheckpointRef] | None:
        """Return the slot of what was stored last, and what it was; None: nothing was."""
        newest = max(self.stored.items(), key=lambda each: each[1], default=None)
        return None if newest is None else (newest[0], newest[1])

    def send(self, op: str, **fields: Any) -> None:
        """Tell the worker something; one that is gone needs nothing."""
        with contextlib.suppress(OSError):
            self.connection.send(op, **fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """The segment of a worker that is gone."""

    fd: int
    rank: int
    world_size: int
    ref: CheckpointRef
    """What its arena held when it was last stored. It may hold something else by now: checksums tell."""

    since_s: float


class LeftSegments:
    """Segments that wait for the next worker group, which saves it making memory and reading from storage.

    Thread-safe. Times are monotonic seconds.
    """

    def __init__(self, *, keep_s: float) -> None:
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._left: list[Left] = []

    def add(self, left: Left) -> None:
        """Keep one; it takes over the descriptor."""
        with self._lock:
            self._left.append(left)

    def take(self, *, rank: int, world_size: int) -> Left | None:
        """Hand one out, with its descriptor: that of the same rank; else any, for its memory."""
        with self._lock:
            same = [left for left in self._left if (left.rank, left.world_size) == (rank, world_size)]
            found = (same or self._left)[-1:]
            if not found:
                return None
            self._left.remove(found[0])
            return found[0]

    def drop(self, *, now_s: float) -> None:
        """Give up those that nobody has come for; a node may have no workers in the next group."""
        self._drop([left for left in self._left if left.since_s + self._keep_s < now_s])

    def clear(self) -> None:
        """Give up all."""
        self._drop(list(self._left))

    def _drop(self, some: list[Left]) -> None:
        with self._lock:
            for left in some:
                if left in self._left:
                    self._left.remove(left)
                    os.close(left.fd)


def ref_fields(ref: CheckpointRef | None) -> list[Any] | None:
    """Return a checkpoint as a message has it."""
    return None if ref is None else [ref.step, *ref.generation, ref.plan_id]


def parse_ref(fields: list[Any] | None) -> CheckpointRef | None:
    """Return what `ref_fields` wrote."""
    if fields is None:
        return None
    step, number, id_, plan_id = fields
    return CheckpointRef(step, GenerationId(number, id_), plan_id)
