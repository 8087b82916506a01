"""From the store into a file descriptor: only what is wanted, nothing unverified."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

from raycheck.core.sums import ChunkSums
from raycheck.errors import CorruptCheckpointError
from raycheck.store.checksum import sum_chunks
from raycheck.store.objects import Store
from raycheck.store.spans import Read, Window, plan_windows
from raycheck.store.transfer import pwrite_fully, run_parallel, sleep_unless

WINDOW_BYTES = 16 << 20
_NUM_READS = 2
"""How often a chunk is fetched before it counts as corrupt: the damage may have happened on the way."""


def download(
    store: Store,
    key: str,
    reads: Iterable[Read],
    destination: int,
    *,
    sums: ChunkSums | None,
    parallel: int,
    cancelled: threading.Event,
    on_progress: Callable[[int], None] | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Copy ranges of an object to their places in a file.

    Blocks until all are written. Whole chunks are fetched, each once however
    the reads overlap, and verified before any byte of them is written. Memory
    is ``parallel`` times a window. If it raises, the destination holds some of
    the ranges.

    Args:
        store: Where from.
        key: The object.
        reads: Source offset, length and destination offset of each range.
        destination: A file descriptor; its position is neither used nor moved.
        sums: Of the whole object. None: nothing is verified, and exactly the
            ranges are fetched.
        parallel: Requests at a time.
        cancelled: Set it to give up; seen between windows and while waiting.
        on_progress: Called with the number of bytes of each window that was
            fetched and written, from several threads.
        window_bytes: Most bytes of one request.

    Raises:
        TransferCancelledError: If ``cancelled`` was set.
        ObjectNotFoundError: If the object is not there.
        CorruptCheckpointError: If it is shorter than a range or than ``sums``
            say, or a chunk differs from its checksum.
        StorageError: If it could not be read.
    """
    sleep = sleep_unless(cancelled, key)
    size_bytes = sums.size_bytes if sums else store.size_bytes(key)
    chunk_bytes = sums.chunk_bytes if sums else 1
    try:
        windows = plan_windows(
            reads, size_bytes=size_bytes, chunk_bytes=chunk_bytes, window_bytes=window_bytes
        )
    except ValueError as error:
        raise CorruptCheckpointError(f"{store.url}/{key}: {error}", key=key) from error
    if not windows:
        return

    def work(window: Window, buffer: bytearray) -> None:
        view = memoryview(buffer)[: window.length]
        _fetch(store, key, window, view, sums, sleep)
        for read in window.reads:
            start = read.source_offset - window.offset
            pwrite_fully(destination, view[start : start + read.length], read.destination_offset)
        if on_progress:
            on_progress(window.length)

    run_parallel(
        windows,
        work,
        num_threads=min(parallel, len(windows)),
        buffer_bytes=max(window.length for window in windows),
        check=lambda: sleep(0),
    )


def find_missing(reads: Iterable[Read], held: int, *, offset: int, sums: ChunkSums) -> list[Read]:
    """Return the reads that a file lacks which may hold the object already.

    Blocks while it reads, at the speed of memory. Checksums decide: the file
    may hold something else, or half of it.

    Args:
        reads: As for `download`; cut to chunks in what is returned.
        held: A file descriptor; its position is neither used nor moved.
        offset: Where the object begins in it.
        sums: Of the whole object.

    Raises:
        CorruptCheckpointError: If a read is outside of what ``sums`` say.
    """
    try:
        windows = plan_windows(
            reads, size_bytes=sums.size_bytes, chunk_bytes=sums.chunk_bytes, window_bytes=sums.chunk_bytes
        )
    except ValueError as error:
        raise CorruptCheckpointError(str(error)) from error
    buffer = memoryview(bytearray(max((window.length for window in windows), default=0)))
    missing: list[Read] = []
    for window in windows:
        view = buffer[: window.length]
        filled = os.preadv(held, [view], offset + window.offset)
        if filled < window.length or _first_bad_chunk(window, view, sums) is not None:
            missing += window.reads
    return missing


def _fetch(
    store: Store,
    key: str,
    window: Window,
    view: memoryview,
    sums: ChunkSums | None,
    sleep: Callable[[float], None],
) -> None:
    """Fill ``view`` with the verified bytes of a window."""
    fault = ""
    for _ in range(_NUM_READS):
        filled = store.run(
            "read", key, lambda backend: backend.read_into(key, window.offset, view), sleep=sleep
        )
        if filled < window.length:
            fault = f"it ends at byte {window.offset + filled}, {window.offset + window.length} are needed"
            continue
        bad = _first_bad_chunk(window, view, sums) if sums else None
        if bad is None:
            return
        fault = f"chunk {bad} differs from its checksum"
    raise CorruptCheckpointError(f"{store.url}/{key} is corrupt: {fault}", key=key)


def _first_bad_chunk(window: Window, view: memoryview, sums: ChunkSums) -> int | None:
    first = window.offset // sums.chunk_bytes
    for number, value in enumerate(sum_chunks(view, sums.chunk_bytes), start=first):
        if sums.sums[number] != value:
            return number
    return None
