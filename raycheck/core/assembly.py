"""How whole tensors are put together from the boxes of a checkpoint: pure planning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from raycheck.core.layout import Chunk, Entry

Placed = tuple[Chunk, int]
"""A box of a tensor, and where its first byte goes."""


def whole_chunks(entries: Iterable[Entry], *, rank: int) -> list[Chunk]:
    """Return every tensor as one box: those that all ranks share, and those that are ``rank``'s own.

    In the order of the entries, which is that of the model where ranks wrote
    what they were dealt.
    """
    found: dict[str, Chunk] = {}
    for entry in entries:
        if entry.owner not in (-1, rank):
            continue
        known = found.get(entry.name)
        if known is not None and known.num_bytes:
            continue
        count = math.prod(entry.shape)
        # Without elements the size of one is not known, nor needed.
        item_bytes = entry.num_bytes // count if count else 0
        shape = entry.global_shape
        found[entry.name] = Chunk(
            entry.name, entry.dtype, item_bytes, shape, (0,) * len(shape), shape, entry.owner
        )
    return list(found.values())


def in_batches(
    placed: Iterable[Placed], entries: Iterable[Entry], *, max_reads: int
) -> Iterator[list[Placed]]:
    """Yield what is wanted in batches that take at most about ``max_reads`` reads each.

    A tensor that was cut across its rows takes a read per row, of which there
    may be millions: it is cut along its first dimension.
    """
    num_reads: dict[tuple[str, int], int] = {}
    for entry in entries:
        key = entry.name, entry.owner
        num_reads[key] = num_reads.get(key, 0) + _num_runs(entry)
    batch: list[Placed] = []
    left = max_reads
    for chunk, begin in placed:
        needed = num_reads.get((chunk.name, chunk.owner), 1)
        for piece, at, reads in _cut(chunk, begin, needed, max_reads):
            if batch and reads > left:
                yield batch
                batch, left = [], max_reads
            batch.append((piece, at))
            left -= reads
    if batch:
        yield batch


def _num_runs(entry: Entry) -> int:
    """Return in how many runs of bytes a box lies in its whole tensor."""
    inner = len(entry.shape)
    while inner > 0 and entry.shape[inner - 1] == entry.global_shape[inner - 1]:
        inner -= 1
    return math.prod(entry.shape[: inner - 1]) if inner else 1


def _cut(chunk: Chunk, begin: int, num_reads: int, max_reads: int) -> Iterator[tuple[Chunk, int, int]]:
    rows = chunk.shape[0] if chunk.shape else 1
    num_pieces = min(-(-num_reads // max_reads), rows)
    if num_pieces <= 1:
        yield chunk, begin, num_reads
        return
    row_bytes = chunk.num_bytes // rows
    for i in range(num_pieces):
        first, end = rows * i // num_pieces, rows * (i + 1) // num_pieces
        piece = dataclasses.replace(
            chunk,
            offset=(chunk.offset[0] + first, *chunk.offset[1:]),
            shape=(end - first, *chunk.shape[1:]),
        )
        yield piece, begin + first * row_bytes, -(-num_reads // num_pieces)


def place(chunks: Sequence[Chunk], *, align_bytes: int) -> tuple[list[Placed], int]:
    """Return the chunks one after the other, each at a multiple of ``align_bytes``, and the end of the last."""
    placed: list[Placed] = []
    end = 0
    for chunk in chunks:
        begin = end + -end % align_bytes
        placed.append((chunk, begin))
        end = begin + chunk.num_bytes
    return placed, end
