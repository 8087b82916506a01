"""What keys and bytes exist in the store. No other file decides that.

    <run>/raycheck/
      generations/000003-<id>.claim.json      a worker group has started
      generations/000003-<id>.json            it has restored: parent and chain
      generations/000003-<id>.end.json        it has come to its normal end
      checkpoints/step-0000001200-g000003-<id>-p000012/
        shard-00000-of-00008.safetensors      an arena as it was
        shard-00000-of-00008.sums             its chunk checksums
        manifest.json                         the commit
      layouts/<hash>.parquet                  which chunk lies where in which shard
      telemetry/                              timings and decisions

Every key names the generation, and a checkpoint's also its plan, so no two
writers ever write one key and nothing is overwritten.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.errors import CorruptCheckpointError

ROOT = "raycheck"
GENERATIONS = "generations"
CHECKPOINTS = "checkpoints"
LAYOUTS = "layouts"
TELEMETRY = "telemetry"
MANIFEST = "manifest.json"

HEADER_ALIGN_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

_CLAIM = re.compile(r"(\d{6,})-([0-9a-f]+)\.claim\.json")
_RECORD = re.compile(r"(\d{6,})-([0-9a-f]+)\.json")
_CHECKPOINT = re.compile(r"step-(\d{10,})-g(\d{6,})-([0-9a-f]+)-p(\d{6,})")

# Names of torch dtypes in safetensors. A dtype that is missing here is stored
# as bytes; its true name is in the layout.
SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def claim_key(generation: GenerationId) -> str:
    """Return the key of a generation's claim."""
    return f"{GENERATIONS}/{generation.number:06d}-{generation.id}.claim.json"


def record_key(generation: GenerationId) -> str:
    """Return the key of a generation's record."""
    return f"{GENERATIONS}/{generation.number:06d}-{generation.id}.json"


def end_key(generation: GenerationId) -> str:
    """Return the key that says that a generation ended normally."""
    return f"{GENERATIONS}/{generation.number:06d}-{generation.id}.end.json"


def parse_claim_name(name: str) -> GenerationId | None:
    """Return whose claim a name below ``generations/`` is; None if it is no claim."""
    match = _CLAIM.fullmatch(name)
    return GenerationId(int(match[1]), match[2]) if match else None


def parse_record_name(name: str) -> GenerationId | None:
    """Return whose record a name below ``generations/`` is; None if it is no record."""
    match = _RECORD.fullmatch(name)
    return GenerationId(int(match[1]), match[2]) if match else None


def checkpoint_prefix(ref: CheckpointRef) -> str:
    """Return the prefix that all keys of a checkpoint share, without a slash at its end."""
    return f"{CHECKPOINTS}/step-{ref.step:010d}-{ref.generation}-p{ref.plan_id:06d}"


def parse_checkpoint_name(name: str) -> CheckpointRef | None:
    """Return the checkpoint that a name below ``checkpoints/`` stands for, or None."""
    match = _CHECKPOINT.fullmatch(name)
    if not match:
        return None
    return CheckpointRef(int(match[1]), GenerationId(int(match[2]), match[3]), int(match[4]))


def manifest_key(ref: CheckpointRef) -> str:
    """Return the key whose existence is the commit."""
    return f"{checkpoint_prefix(ref)}/{MANIFEST}"


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's shard within its checkpoint."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def sums_name(shard: str) -> str:
    """Return the name of the checksums that stand beside a shard."""
    return shard.removesuffix(".safetensors") + ".sums"


def layout_key(digest: str) -> str:
    """Return the key of a layout."""
    return f"{LAYOUTS}/{digest}.parquet"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One tensor chunk's record: a box of a global tensor, and its bytes in a shard.

    ``owner`` is the rank whose own value this is; -1 for a value that all
    ranks share. ``begin`` counts from the start of the shard's file.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    rank: int
    begin: int
    num_bytes: int

    def to_row(self) -> list[Any]:
        """Return plain JSON values in the order of the fields."""
        return [
            self.name,
            self.dtype,
            list(self.global_shape),
            list(self.offset),
            list(self.shape),
            self.owner,
            self.rank,
            self.begin,
            self.num_bytes,
        ]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Entry:
        """Read what `to_row` wrote."""
        name, dtype, global_shape, offset, shape, owner, rank, begin, num_bytes = row
        return cls(
            name, dtype, tuple(global_shape), tuple(offset), tuple(shape), owner, rank, begin, num_bytes
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that one rank is to write, before it has a place in a file."""

    name: str
    dtype: str
    item_bytes: int
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int = -1

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        count = self.item_bytes
        for extent in self.shape:
            count *= extent
        return count

    @property
    def name_in_file(self) -> str:
        """The tensor's name in its shard; a rank's own value carries the rank."""
        return self.name if self.owner < 0 else f"{self.name}@rank{self.owner:05d}"


@dataclasses.dataclass(frozen=True, slots=True)
class ShardImage:
    """A shard's file before its tensors are copied in: header and places."""

    header: bytes
    entries: tuple[Entry, ...]
    """In the order of the chunks that were given."""

    num_bytes: int


def shard_image(chunks: Sequence[Chunk], *, rank: int) -> ShardImage:
    """Lay out a safetensors file that holds ``chunks``.

    The format allows no holes, so tensors lie by descending item size and
    each is aligned to its own without any; the header is padded with spaces
    to a page.

    Raises:
        ValueError: If two chunks share a name in the file.
    """
    order = sorted(range(len(chunks)), key=lambda i: (-chunks[i].item_bytes, i))
    begins = [0] * len(chunks)
    position = 0
    for i in order:
        begins[i] = position
        position += chunks[i].num_bytes
    table: dict[str, Any] = {"__metadata__": {"format": "pt", "raycheck": "1"}}
    for i in order:
        chunk = chunks[i]
        if chunk.name_in_file in table:
            raise ValueError(f"two chunks of {chunk.name_in_file!r} in one shard")
        code = SAFETENSORS_DTYPES.get(chunk.dtype)
        table[chunk.name_in_file] = {
            "dtype": code or "U8",
            "shape": list(chunk.shape) if code else [chunk.num_bytes],
            "data_offsets": [begins[i], begins[i] + chunk.num_bytes],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    header_bytes = -(-(len(text) + 8) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES
    header = (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)
    entries = tuple(
        Entry(
            c.name,
            c.dtype,
            c.global_shape,
            c.offset,
            c.shape,
            c.owner,
            rank,
            header_bytes + begin,
            c.num_bytes,
        )
        for c, begin in zip(chunks, begins, strict=True)
    )
    return ShardImage(header, entries, header_bytes + position)


@dataclasses.dataclass(frozen=True, slots=True)
class ShardInfo:
    """A durable shard: its place, size and digest."""

    rank: int
    name: str
    num_bytes: int
    digest: str

    def to_row(self) -> list[Any]:
        """Return plain JSON values."""
        return [self.rank, self.name, self.num_bytes, self.digest]


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """The commit: a checkpoint exists once this object does."""

    ref: CheckpointRef
    world_size: int
    layout_digest: str
    shards: tuple[ShardInfo, ...]
    """One per rank, in order."""

    created_unix_s: float
    write_id: str
    """Unique to this write, so that a lost reply can be told from a failure."""

    metrics: dict[str, float]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's object."""
    ref = manifest.ref
    fields = {
        "format": 1,
        "step": ref.step,
        "generation": list(ref.generation),
        "plan_id": ref.plan_id,
        "world_size": manifest.world_size,
        "layout": manifest.layout_digest,
        "created_unix_s": manifest.created_unix_s,
        "write_id": manifest.write_id,
        "metrics": manifest.metrics,
        "shards": [shard.to_row() for shard in manifest.shards],
    }
    return json.dumps(fields, indent=1).encode()


def decode_manifest(data: bytes, ref: CheckpointRef) -> Manifest:
    """Read a manifest and check that it is whole and the one of ``ref``.

    Raises:
        CorruptCheckpointError: Otherwise, naming the key.
    """
    key = manifest_key(ref)
    try:
        fields = json.loads(data)
        if fields["format"] != 1:
            raise ValueError(f"format {fields['format']!r} is newer than this version of raycheck reads")
        number, id_ = fields["generation"]
        manifest = Manifest(
            ref=CheckpointRef(fields["step"], GenerationId(number, id_), fields["plan_id"]),
            world_size=fields["world_size"],
            layout_digest=fields["layout"],
            shards=tuple(ShardInfo(*row) for row in fields["shards"]),
            created_unix_s=float(fields["created_unix_s"]),
            write_id=str(fields["write_id"]),
            metrics=dict(fields["metrics"]),
        )
        _check_manifest(manifest, ref)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"step {ref.step}: {key} is damaged ({error}); an older checkpoint can be used",
            step=ref.step,
            key=key,
        ) from error
    return manifest


def _check_manifest(manifest: Manifest, ref: CheckpointRef) -> None:
    if manifest.ref != ref:
        raise ValueError(f"it is the manifest of {manifest.ref}")
    if not re.fullmatch(r"[0-9a-f]{8,64}", manifest.layout_digest):
        raise ValueError(f"layout {manifest.layout_digest!r}")
    if len(manifest.shards) != manifest.world_size:
        raise ValueError(f"{len(manifest.shards)} shards for {manifest.world_size} ranks")
    for rank, shard in enumerate(manifest.shards):
        # Also keeps a forged manifest from naming objects outside its checkpoint.
        if shard.rank != rank or shard.name != shard_name(rank, manifest.world_size):
            raise ValueError(f"shard {rank} is called {shard.name!r}")
        if not isinstance(shard.num_bytes, int) or shard.num_bytes <= 0:
            raise ValueError(f"shard {rank} has {shard.num_bytes!r} bytes")
        if not isinstance(shard.digest, str) or not re.fullmatch(r"[0-9a-f]{8}", shard.digest):
            raise ValueError(f"shard {rank} has the digest {shard.digest!r}")


def uncovered(entries: Iterable[Entry]) -> str | None:
    """Return what is wrong if the shards' boxes do not make up every tensor once; None if they do.

    Counts elements, which finds what a rank left out or wrote in another's
    place; it is asked once per layout, before the first commit that uses it.
    """
    counts: dict[tuple[str, int], int] = {}
    shapes: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}
    for entry in entries:
        key = entry.name, entry.owner
        counts[key] = counts.get(key, 0) + math.prod(entry.shape)
        kind = shapes.setdefault(key, (entry.dtype, entry.global_shape))
        if kind != (entry.dtype, entry.global_shape):
            return (
                f"{entry.name} is {entry.dtype} {list(entry.global_shape)} on rank {entry.rank}, "
                f"elsewhere {kind[0]} {list(kind[1])}"
            )
    for key, count in counts.items():
        wanted = math.prod(shapes[key][1])
        if count != wanted:
            return f"the ranks' parts of {key[0]} have {count} elements in all, the tensor has {wanted}"
    return None


def check_entries(entries: Iterable[Entry], manifest: Manifest) -> None:
    """Check that a layout's entries lie inside the manifest's shards.

    Raises:
        CorruptCheckpointError: If one does not.
    """
    sizes = [shard.num_bytes for shard in manifest.shards]
    for entry in entries:
        end = entry.begin + entry.num_bytes
        if (
            not 0 <= entry.rank < len(sizes)
            or entry.begin < 0
            or entry.num_bytes < 0
            or end > sizes[entry.rank]
        ):
            raise CorruptCheckpointError(
                f"step {manifest.ref.step}: the layout places {entry.name!r} outside its shard",
                step=manifest.ref.step,
                key=layout_key(manifest.layout_digest),
            )
