"""Reads stored objects from end to end and compares them with their checksums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from raycheck.core.sums import ChunkSums
from raycheck.errors import ObjectNotFoundError
from raycheck.store.checksum import sum_chunks
from raycheck.store.objects import Store
from raycheck.store.spans import Read, Window, plan_windows
from raycheck.store.transfer import run_parallel, sleep_unless

WINDOW_BYTES = 8 << 20
_NUM_READS = 2
"""How often a window is fetched before its damage counts: it may have happened on the way."""


class Damage(NamedTuple):
    """Part of an object that is not what was committed."""

    key: str
    chunk: int | None
    """Which chunk of its checksums; None: the object as a whole."""

    detail: str


def find_damage(
    store: Store,
    objects: Sequence[tuple[str, ChunkSums]],
    *,
    parallel: int,
    cancelled: threading.Event,
    on_progress: Callable[[int], None] | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> list[Damage]:
    """Return every chunk of the objects that differs from its checksum, by key and chunk.

    Blocks until all of them have been read. Memory is ``parallel`` times a
    window, or a chunk if that is larger, whatever the objects' sizes.

    Args:
        store: Where they are.
        objects: Keys, and what they should be.
        parallel: Requests at a time.
        cancelled: Set it to give up; seen between windows and while waiting.
        on_progress: Called with the bytes of each window, from several threads.
        window_bytes: Most bytes of one request.

    Raises:
        TransferCancelledError: If ``cancelled`` was set.
        StorageError: If the store cannot be read, other than an object being gone.
    """
    found: list[Damage] = []
    sleep = sleep_unless(cancelled, "objects to verify")

    def work(task: tuple[str, ChunkSums, Window], buffer: bytearray) -> None:
        key, sums, window = task
        view = memoryview(buffer)[: window.length]
        found.extend(_look_twice(store, key, sums, window, view, sleep))
        if on_progress:
            on_progress(window.length)

    largest = max(
        (min(sums.size_bytes, max(window_bytes, sums.chunk_bytes)) for _, sums in objects), default=0
    )
    run_parallel(
        _tasks(objects, window_bytes),
        work,
        num_threads=parallel,
        buffer_bytes=largest,
        check=lambda: sleep(0),
    )
    return _once_per_object(found)


def _tasks(
    objects: Sequence[tuple[str, ChunkSums]], window_bytes: int
) -> Iterator[tuple[str, ChunkSums, Window]]:
    for key, sums in objects:
        whole = [Read(0, sums.size_bytes, 0)]
        for window in plan_windows(
            whole, size_bytes=sums.size_bytes, chunk_bytes=sums.chunk_bytes, window_bytes=window_bytes
        ):
            yield key, sums, window


def _look_twice(
    store: Store,
    key: str,
    sums: ChunkSums,
    window: Window,
    view: memoryview,
    sleep: Callable[[float], None],
) -> list[Damage]:
    damage: list[Damage] = []
    for _ in range(_NUM_READS):
        try:
            filled = store.run(
                "read", key, lambda backend: backend.read_into(key, window.offset, view), sleep=sleep
            )
        except ObjectNotFoundError:
            return [Damage(key, None, "it is missing")]
        damage = _damage_in(key, sums, window, view[:filled])
        if not damage:
            return []
    return damage


def _damage_in(key: str, sums: ChunkSums, window: Window, data: memoryview) -> list[Damage]:
    if len(data) < window.length:
        end = window.offset + len(data)
        return [Damage(key, None, f"it ends at byte {end:,} of {sums.size_bytes:,}")]
    first = window.offset // sums.chunk_bytes
    return [
        Damage(key, number, f"{_span_text(number, sums)} differ from their checksum")
        for number, value in enumerate(sum_chunks(data, sums.chunk_bytes), start=first)
        if sums.sums[number] != value
    ]


def _span_text(chunk: int, sums: ChunkSums) -> str:
    begin = chunk * sums.chunk_bytes
    return f"bytes {begin:,} to {min(begin + sums.chunk_bytes, sums.size_bytes) - 1:,}"


def _once_per_object(found: list[Damage]) -> list[Damage]:
    """Return damage by place; of an object that is gone or cut short, the first word alone."""
    kept: dict[tuple[str, int], Damage] = {}
    for each in sorted(found, key=lambda damage: (damage.key, -1 if damage.chunk is None else damage.chunk)):
        kept.setdefault((each.key, -1 if each.chunk is None else each.chunk), each)
    return list(kept.values())
