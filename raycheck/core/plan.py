"""Who writes and who reads which bytes: pure planning on boxes of tensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence

from raycheck.core.layout import Chunk, Entry

SPLIT_ABOVE_BYTES = 1 << 20
"""Tensors up to this size are dealt whole: cutting them gains no balance worth an entry."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that all ranks hold alike."""

    name: str
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.item_bytes * math.prod(self.shape)

    def rows(self, first: int, end: int) -> Chunk:
        """Return the chunk of rows ``[first, end)``; the whole of a 0-dim tensor."""
        if not self.shape:
            return Chunk(self.name, self.dtype, self.item_bytes, (), (), ())
        rest = self.shape[1:]
        return Chunk(
            self.name,
            self.dtype,
            self.item_bytes,
            self.shape,
            (first, *(0 for _ in rest)),
            (end - first, *rest),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The box of a sharded tensor that one rank holds."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    holder: int
    """This rank's place among the ranks that hold this very box."""

    num_holders: int

    @property
    def first_row(self) -> int:
        """Where the box begins along dimension 0."""
        return self.offset[0] if self.offset else 0

    def share(self, spec: TensorSpec) -> Chunk | None:
        """Return the part of the box that this holder is to write; None if others write it all.

        The holders' parts cover the box once: a large one is cut along
        dimension 0, a small one goes to a holder that its name decides.
        """
        first, end = 0, self.shape[0] if self.shape else 1
        if spec.num_bytes <= SPLIT_ABOVE_BYTES or not self.shape:
            if zlib.crc32(spec.name.encode()) % self.num_holders != self.holder:
                return None
        else:
            first, end = (end * (self.holder + i) // self.num_holders for i in (0, 1))
            if first == end:
                return None
        return self.box(spec, first, end)

    def box(self, spec: TensorSpec, first: int, end: int) -> Chunk:
        """Return rows ``[first, end)`` of the box, counted from its own first row."""
        if not self.shape:
            return spec.rows(0, 1)
        offset = (self.offset[0] + first, *self.offset[1:])
        shape = (end - first, *self.shape[1:])
        return Chunk(spec.name, spec.dtype, spec.item_bytes, self.global_shape, offset, shape)


def deal(
    specs: Sequence[TensorSpec], num_ranks: int, spared: Collection[int] = frozenset()
) -> list[list[Chunk]]:
    """Deal tensors that every rank holds alike to the ranks, evenly by bytes.

    Deterministic: every rank computes the same result from its own state. All
    bytes lie on one line in the order given, cut into equal spans; a large
    tensor is cut along dimension 0, a small one goes where its middle lies.

    Args:
        specs: The tensors.
        num_ranks: Number of ranks.
        spared: Ranks that get nothing, as long as others are left.

    Returns:
        For each rank its chunks. Each tensor's elements are covered once.
    """
    takers = [rank for rank in range(num_ranks) if rank not in spared] or list(range(num_ranks))
    shares: list[list[Chunk]] = [[] for _ in range(num_ranks)]
    for rank, share in zip(takers, _deal_evenly(specs, len(takers)), strict=True):
        shares[rank] = share
    return shares


def _deal_evenly(specs: Sequence[TensorSpec], num_ranks: int) -> list[list[Chunk]]:
    total_bytes = sum(spec.num_bytes for spec in specs)
    shares: list[list[Chunk]] = [[] for _ in range(num_ranks)]
    begin = 0
    for spec in specs:
        if spec.num_bytes <= SPLIT_ABOVE_BYTES or not spec.shape or num_ranks == 1:
            rows = spec.shape[0] if spec.shape else 1
            middle = begin + spec.num_bytes // 2
            shares[_span_of(middle, total_bytes, num_ranks)].append(spec.rows(0, rows))
        else:
            for rank, chunk in _cut(spec, begin, total_bytes, num_ranks):
                shares[rank].append(chunk)
        begin += spec.num_bytes
    return shares


def _span_of(position: int, total_bytes: int, num_ranks: int) -> int:
    return min(position * num_ranks // total_bytes, num_ranks - 1) if total_bytes else 0


def _cut(spec: TensorSpec, begin: int, total_bytes: int, num_ranks: int) -> Iterator[tuple[int, Chunk]]:
    num_rows = spec.shape[0]
    row_bytes = spec.num_bytes // num_rows
    first = 0
    for rank in range(_span_of(begin, total_bytes, num_ranks), num_ranks):
        span_end = total_bytes * (rank + 1) // num_ranks
        end = (
            num_rows
            if rank == num_ranks - 1
            else min(num_rows, max(0, round((span_end - begin) / row_bytes)))
        )
        if end > first:
            yield rank, spec.rows(first, end)
            first = end
        if first == num_rows:
            return


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a shard, and where they go in the reader's memory."""

    rank: int
    """The shard to read from."""

    source: int
    """Byte offset in the shard's file."""

    num_bytes: int
    destination: int
    """Byte offset in the reader's memory."""


def plan_reads(wanted: Iterable[tuple[Chunk, int]], entries: Iterable[Entry]) -> list[Read]:
    """Plan which shard bytes fill the wanted boxes.

    Works for any pair of world sizes: what counts is where boxes overlap.

    Args:
        wanted: Boxes and the destination of each one's first byte; a box is
            filled in row-major order.
        entries: A layout.

    Returns:
        Reads, by shard and source offset.

    Raises:
        LookupError: If the entries do not cover a wanted box; its argument is
            the name.
    """
    by_name: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        by_name.setdefault((entry.name, entry.owner), []).append(entry)
    reads: list[Read] = []
    for chunk, destination in wanted:
        found_bytes = 0
        for entry in by_name.get((chunk.name, chunk.owner), ()):
            for read in _overlap(chunk, destination, entry):
                found_bytes += read.num_bytes
                reads.append(read)
        if found_bytes != chunk.num_bytes:
            raise LookupError(chunk.name)
    return sorted(reads, key=lambda read: (read.rank, read.source))


def _overlap(chunk: Chunk, destination: int, entry: Entry) -> Iterator[Read]:
    low = [max(a, b) for a, b in zip(chunk.offset, entry.offset, strict=True)]
    high = [
        min(a + n, b + m)
        for a, n, b, m in zip(chunk.offset, chunk.shape, entry.offset, entry.shape, strict=True)
    ]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return
    # Trailing dimensions that both boxes hold whole form one run of bytes.
    inner = len(low)
    run_items = 1
    while inner > 0:
        inner -= 1
        extent = high[inner] - low[inner]
        run_items *= extent
        if extent != chunk.shape[inner] or extent != entry.shape[inner]:
            break
    starts = [range(low[d], high[d]) for d in range(inner)]
    tail = low[inner:]
    for head in itertools.product(*starts):
        at = [*head, *tail]
        yield Read(
            entry.rank,
            entry.begin + _index(at, entry.offset, entry.shape) * chunk.item_bytes,
            run_items * chunk.item_bytes,
            destination + _index(at, chunk.offset, chunk.shape) * chunk.item_bytes,
        )


def _index(at: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for position, start, extent in zip(at, offset, shape, strict=True):
        index = index * extent + position - start
    return index
