"""How an object is cut for its way to the store and back: pure arithmetic."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from raycheck.store.backend import PartLimits


class Part(NamedTuple):
    """A piece of an object that is uploaded in one request."""

    number: int
    offset: int
    length: int


class Read(NamedTuple):
    """Bytes of an object that are wanted, and where they go."""

    source_offset: int
    length: int
    destination_offset: int


class Window(NamedTuple):
    """A piece of an object that is fetched in one request, and the reads it serves."""

    offset: int
    length: int
    reads: tuple[Read, ...]
    """Cut to the window."""


def plan_parts(size_bytes: int, *, chunk_bytes: int, limits: PartLimits) -> list[Part]:
    """Return the parts of an object, in order; they cover every byte once.

    All but the last have one size, a multiple of ``chunk_bytes``, so that a
    chunk never spans two parts: the default where it fits, else as large as
    ``limits`` demand.
    """
    assert size_bytes > 0, "no empty objects"
    assert chunk_bytes > 0, "chunks have bytes"
    least = max(limits.default_part_bytes, limits.min_part_bytes, -(-size_bytes // limits.max_parts))
    part_bytes = -(-least // chunk_bytes) * chunk_bytes
    return [
        Part(number, offset, min(part_bytes, size_bytes - offset))
        for number, offset in enumerate(range(0, size_bytes, part_bytes))
    ]


def plan_windows(
    reads: Iterable[Read], *, size_bytes: int, chunk_bytes: int, window_bytes: int
) -> list[Window]:
    """Return the windows that serve all reads, in order of offset.

    Each begins and ends at a chunk boundary or the end of the object, is at
    most ``window_bytes`` long (but at least one chunk), and no byte is fetched
    twice, however the reads overlap.

    Raises:
        ValueError: If a read is outside the object.
    """
    wanted = sorted(read for read in reads if read.length)
    for read in wanted:
        if min(read) < 0 or read.source_offset + read.length > size_bytes:
            raise ValueError(f"{read} is outside an object of {size_bytes} bytes")
    step = max(1, window_bytes // chunk_bytes) * chunk_bytes
    windows = []
    for start, end in _aligned_runs(wanted, chunk_bytes, size_bytes):
        first = bisect.bisect_left(wanted, start, key=_source)
        last = bisect.bisect_left(wanted, end, key=_source)
        pieces = _cut(wanted[first:last], start, step)
        windows += [
            Window(offset, min(step, end - offset), tuple(pieces.get(offset, ())))
            for offset in range(start, end, step)
            if offset in pieces
        ]
    return windows


def _source(read: Read) -> int:
    return read.source_offset


def _aligned_runs(reads: Sequence[Read], chunk_bytes: int, size_bytes: int) -> list[tuple[int, int]]:
    """Return disjoint runs of chunks that cover the sorted reads."""
    runs: list[tuple[int, int]] = []
    for read in reads:
        start = read.source_offset // chunk_bytes * chunk_bytes
        end = min(size_bytes, -(-(read.source_offset + read.length) // chunk_bytes) * chunk_bytes)
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((start, end))
    return runs


def _cut(reads: Iterable[Read], start: int, step: int) -> dict[int, list[Read]]:
    """Return the reads cut at window boundaries, by window offset."""
    pieces: dict[int, list[Read]] = {}
    for read in reads:
        offset, end = read.source_offset, read.source_offset + read.length
        while offset < end:
            window = start + (offset - start) // step * step
            length = min(end, window + step) - offset
            destination = read.destination_offset + offset - read.source_offset
            pieces.setdefault(window, []).append(Read(offset, length, destination))
            offset += length
    return pieces
