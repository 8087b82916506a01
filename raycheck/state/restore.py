"""Restoring: which bytes this rank needs, and how they reach the live tensors.

Tensors that every rank needs whole are dealt to the ranks as for a snapshot:
each reads its part into the arena, and once every rank has verified its own,
the parts go round over the process group. Of a sharded tensor a rank reads its
own box. So storage sends each byte about once per job, whatever the world size
and the sharding were when it was saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from raycheck.core.layout import VALUES, Chunk, Entry, shard_image
from raycheck.core.plan import Piece, Read, TensorSpec, deal, plan_reads
from raycheck.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from raycheck.state.codec import Codec
from raycheck.state.parts import SavedTensor
from raycheck.state.rng import check_rng, restore_rng, seed_rng
from raycheck.state.segment import Segment
from raycheck.state.sharded import Shards, whole_piece
from raycheck.state.tree import StateTree

_BUCKET_BYTES = 32 << 20
_MAX_GAP_BYTES = 64 << 10
"""What lies between the parts of a bucket goes round with them: a rank's own values, which are small."""

# Not by attribute of the module, some of which are imported when they are asked for; and
# without quantized ones, which no snapshot takes and no tensor is made of by its type alone.
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Placed:
    chunk: Chunk
    begin: int


class Restorer:
    """One rank's restore of one checkpoint. Used by the training thread alone.

    Args:
        tree: The live state.
        segment: Memory to read into.
        entries: The checkpoint's layout.
        saved_world_size: Ranks that wrote it.
        rank: This rank.
        world_size: Ranks now.
        codec: For plain values.
        has_group: Whether a process group joins all ranks. Without one, each
            rank reads all it needs.

    Raises:
        CheckpointMismatchError: If the checkpoint does not fit the live state,
            which has not been changed.
    """

    def __init__(
        self,
        tree: StateTree,
        segment: Segment,
        entries: Sequence[Entry],
        *,
        saved_world_size: int,
        rank: int,
        world_size: int,
        codec: Codec,
        has_group: bool,
    ) -> None:
        self._tree = tree
        self._segment = segment
        self._rank = rank
        self._codec = codec
        self._saved_world_size = saved_world_size
        # A rank beyond those that saved takes another's values; its random
        # generators are seeded anew.
        self._owner = rank % saved_world_size
        self._num_readers = world_size if has_group else 1
        self._reader = rank if has_group else 0
        shared, own = _saved_tensors(entries, self._owner)
        saved = {name: SavedTensor(_dtype(spec.dtype), spec.shape) for name, spec in (shared | own).items()}
        saved.pop(VALUES)
        found = tree.destinations(saved)
        self._targets = found.tensors
        self.unmatched = found.unmatched
        """What is only in the checkpoint or only here; empty where that is not allowed."""

        local, pieces = Shards(world_size).look(list(self._targets), list(self._targets.values()))
        self._local = dict(zip(self._targets, zip(local, pieces, strict=True), strict=True))
        dealt = [
            spec
            for name, spec in shared.items()
            if name in self._targets and name not in found.apart and self._local[name][1] is None
        ]
        # Where the same ranks go on, each takes what its shard has, placed as in the shard: a
        # former worker's arena may hold it already.
        is_same = saved_world_size == world_size == self._num_readers
        homes = _homes(entries, world_size) if is_same else {}
        shares = _as_saved(dealt, homes) if is_same else deal(dealt, self._num_readers)
        self._shares = [_place(chunks, homes.get(reader, {})) for reader, chunks in enumerate(shares)]
        mine = self._shares[self._reader]
        own_chunks = self._boxes(shared, dealt) + self._own_chunks(own)
        self._own = _place(own_chunks, homes.get(rank, {}), behind=mine)
        self._wanted = [*mine, *self._own]
        self._entries = entries

    def _boxes(self, shared: dict[str, TensorSpec], dealt: list[TensorSpec]) -> list[Chunk]:
        """Return the boxes that this rank reads for itself alone."""
        read_by_all = {spec.name for spec in dealt}
        boxes = []
        for name, spec in shared.items():
            if name in self._targets and name not in read_by_all:
                tensor, piece = self._local[name]
                piece = piece or whole_piece(tensor)
                boxes.append(piece.box(spec, 0, piece.shape[0] if piece.shape else 1))
        return boxes

    def _own_chunks(self, own: dict[str, TensorSpec]) -> list[Chunk]:
        """Return the values of the saved rank whose place this rank takes."""
        return [
            dataclasses.replace(spec.rows(0, spec.shape[0] if spec.shape else 1), owner=self._owner)
            for name, spec in own.items()
            if name in self._targets or name == VALUES
        ]

    @property
    def num_bytes(self) -> int:
        """Arena bytes that the reads fill."""
        return max((placed.begin + placed.chunk.num_bytes for placed in self._wanted), default=0)

    def plan(self) -> list[Read]:
        """Return the reads that this rank needs, and make room for them.

        Raises:
            CorruptCheckpointError: If the layout does not cover the state.
        """
        self._segment.ensure(self.num_bytes)
        try:
            return plan_reads(((placed.chunk, placed.begin) for placed in self._wanted), self._entries)
        except LookupError as error:
            raise CorruptCheckpointError(f"the layout lacks bytes of {error.args[0]!r}") from error

    def check(self) -> None:
        """Look at what was read, before anything live changes; completes `unmatched`.

        Raises:
            CorruptCheckpointError: If the plain values are damaged.
            CheckpointMismatchError: If an object says that they do not fit it.
        """
        values = self._values()
        try:
            check_rng(values.pop("rng"))
            unmatched = self._tree.check(values)
        except CheckpointError:
            raise
        # Not of the form that `capture` gives it. Their bytes are those that were committed,
        # so an older checkpoint is no cure: nothing is loaded, and the user is told.
        except (TypeError, LookupError, AttributeError, ValueError, RuntimeError) as error:
            raise CheckpointMismatchError(
                f"the checkpoint's plain values are not of the form of this state: {repr(error)[:300]}"
            ) from error
        self.unmatched += [text for text in unmatched if text not in self.unmatched]

    def _values(self) -> dict[str, Any]:
        placed = next(p for p in self._own if p.chunk.name == VALUES)
        text = bytes(self._segment.arena[placed.begin : placed.begin + placed.chunk.num_bytes])
        loaded = self._codec.loads(text, self._targets, self._wants)
        if not isinstance(loaded, dict) or "rng" not in loaded:
            raise CorruptCheckpointError("stored values are damaged: no generators among them")
        return loaded

    def _wants(self, part_name: str) -> bool:
        return part_name == "rng" or self._tree.wants(part_name)

    def load(self, seed_parts: tuple[object, ...]) -> None:
        """Copy everything into the live state. All ranks must have verified their bytes.

        Blocks for the exchange between the ranks, where there is one.

        Args:
            seed_parts: What to seed the generators from on a rank without saved ones.

        Raises:
            CheckpointMismatchError: If an object refuses what was saved for it.
        """
        with torch.no_grad():
            for reader, share in enumerate(self._shares):
                for bucket in _buckets(share):
                    self._deliver(reader, bucket)
            for placed in self._own:
                if placed.chunk.name != VALUES:
                    self._fill(placed.chunk, self._arena_bytes(placed.begin, placed.chunk.num_bytes))
        values = self._values()
        rng = values.pop("rng")
        self._tree.load(values, self._targets)
        if self._rank < self._saved_world_size:
            restore_rng(rng)
        else:
            seed_rng(*seed_parts, self._rank)

    def _deliver(self, reader: int, bucket: list[_Placed]) -> None:
        begin = bucket[0].begin
        num_bytes = bucket[-1].begin + bucket[-1].chunk.num_bytes - begin
        if reader == self._reader:
            data = self._arena_bytes(begin, num_bytes)
        else:
            data = torch.empty(num_bytes, dtype=torch.uint8)
        if self._num_readers > 1 and num_bytes:
            data = _broadcast(data, reader)
        for placed in bucket:
            first = placed.begin - begin
            self._fill(placed.chunk, data[first : first + placed.chunk.num_bytes])

    def _fill(self, chunk: Chunk, data: torch.Tensor) -> None:
        """Copy what a chunk and the live tensor of this rank have in common."""
        target, piece = self._local[chunk.name]
        source = data.view(target.dtype).view(chunk.shape)
        spans = _common(chunk, piece)
        if any(low >= high for low, high, _ in spans):
            return
        for dim, (low, high, at) in enumerate(spans):
            target = target.narrow(dim, low - at, high - low)
            source = source.narrow(dim, low - chunk.offset[dim], high - low)
        # An inference tensor may be written to in this mode alone.
        with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
            target.copy_(source)

    def _arena_bytes(self, begin: int, num_bytes: int) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._segment.arena[begin : begin + num_bytes], dtype=torch.uint8)


def _saved_tensors(
    entries: Sequence[Entry], owner: int
) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Return the shared tensors and those of ``owner``, in an order that all ranks share."""
    shared: dict[str, TensorSpec] = {}
    own: dict[str, TensorSpec] = {}
    for entry in entries:
        into = shared if entry.owner < 0 else own if entry.owner == owner else None
        if into is not None and entry.name not in into:
            item_bytes = _dtype(entry.dtype).itemsize
            into[entry.name] = TensorSpec(entry.name, entry.dtype, item_bytes, entry.global_shape)
    if VALUES not in own:
        raise CorruptCheckpointError(f"the layout has no values of rank {owner}")
    # Largest items first: each chunk is then aligned to its own size in the arena.
    return {spec.name: spec for spec in sorted(shared.values(), key=_placing)}, own


def _placing(spec: TensorSpec) -> tuple[int, str]:
    return -spec.item_bytes, spec.name


def _homes(entries: Sequence[Entry], num_ranks: int) -> dict[int, dict[tuple[object, ...], Entry]]:
    """Return, for each shard, its entries by what they are."""
    homes: dict[int, dict[tuple[object, ...], Entry]] = {rank: {} for rank in range(num_ranks)}
    for entry in entries:
        homes.setdefault(entry.rank, {})[_identity(entry)] = entry
    return homes


def _as_saved(
    specs: Sequence[TensorSpec], homes: Mapping[int, Mapping[tuple[object, ...], Entry]]
) -> list[list[Chunk]]:
    """Return for each rank the parts of some tensors that its shard has."""
    by_name = {spec.name: spec for spec in specs}
    missing_bytes = {spec.name: spec.num_bytes for spec in specs}
    shares: list[list[Chunk]] = [[] for _ in homes]
    for rank, home in sorted(homes.items()):
        for entry in home.values():
            spec = by_name.get(entry.name)
            if spec is not None and entry.owner < 0:
                missing_bytes[entry.name] -= entry.num_bytes
                shares[rank].append(
                    Chunk(spec.name, spec.dtype, spec.item_bytes, spec.shape, entry.offset, entry.shape)
                )
    for name, num_bytes in missing_bytes.items():
        if num_bytes:
            raise CorruptCheckpointError(f"the layout lacks bytes of {name!r}")
    return shares


def _identity(part: Chunk | Entry) -> tuple[object, ...]:
    return part.name, part.owner, part.offset, part.shape


def _place(
    chunks: Sequence[Chunk], home: Mapping[tuple[object, ...], Entry], *, behind: Sequence[_Placed] = ()
) -> list[_Placed]:
    """Place each chunk where its shard has it; others one after the other, behind the shard and ``behind``."""
    at_home = [c for c in chunks if _identity(c) in home and home[_identity(c)].begin % c.item_bytes == 0]
    placed = [_Placed(c, home[_identity(c)].begin) for c in at_home]
    end = max((entry.begin + entry.num_bytes for entry in home.values()), default=0)
    end = max([end, *(p.begin + p.chunk.num_bytes for p in behind)])
    end += -end % 16
    placed_names = {_identity(c) for c in at_home}
    others = [c for c in chunks if _identity(c) not in placed_names]
    image = shard_image(others, rank=0)
    base = len(image.header) - end
    placed += [_Placed(c, e.begin - base) for c, e in zip(others, image.entries, strict=True)]
    return sorted(placed, key=lambda p: p.begin)


def _common(chunk: Chunk, piece: Piece | None) -> list[tuple[int, int, int]]:
    """Return, per dimension, where what both have begins and ends, and where the piece begins."""
    offset = piece.offset if piece else (0,) * len(chunk.shape)
    shape = piece.shape if piece else chunk.global_shape
    spans = []
    for first, extent, at, size in zip(chunk.offset, chunk.shape, offset, shape, strict=True):
        low = max(first, at)
        spans.append((low, min(first + extent, at + size), at))
    return spans


def _buckets(share: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Yield neighbours that go round together: one exchange per bucket instead of per tensor."""
    bucket: list[_Placed] = []
    last_end = 0
    for placed in share:
        end = placed.begin + placed.chunk.num_bytes
        if bucket and (end - bucket[0].begin > _BUCKET_BYTES or placed.begin - last_end > _MAX_GAP_BYTES):
            yield bucket
            bucket = []
        bucket.append(placed)
        last_end = end
    if bucket:
        yield bucket


def _broadcast(data: torch.Tensor, source: int) -> torch.Tensor:
    if dist.get_backend() == "nccl":
        data = data.to(torch.device("cuda", torch.cuda.current_device()))
    dist.broadcast(data, source)
    return data


def _dtype(name: str) -> torch.dtype:
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise CorruptCheckpointError(f"the layout has the dtype {name!r}, which this torch does not know")
    return dtype
