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
      registered/step-0000001200-g000003-<id>-p000012.json
                                              Ray Train has been given this checkpoint
      telemetry/                              timings and decisions

Every key names the generation, and a checkpoint's also its plan, so no two
writers ever write one key and nothing is overwritten.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.sums import MAX_OBJECT_BYTES
from raycheck.errors import CorruptCheckpointError

VALUES = "values"
"""The entry that holds a rank's plain values, as JSON padded with spaces."""

ROOT = "raycheck"
GENERATIONS = "generations"
CHECKPOINTS = "checkpoints"
LAYOUTS = "layouts"
REGISTERED = "registered"
TELEMETRY = "telemetry"
MANIFEST = "manifest.json"
LAYOUT_COPY = "layout.parquet"
"""In the folder of a registered checkpoint, which may be copied or read without the rest of the run."""


HEADER_ALIGN_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

MAX_ITEM_BYTES = 16
"""Of one element of a tensor: complex128."""

MAX_DIMENSIONS = 64

MAX_ENTRIES_PER_SHARD = 2_000_000
"""What a shard's header can list: each tensor takes 50 bytes of it or more."""

# Bounded, since the length of a number that is read from a listing is not ours to choose.
_CLAIM = re.compile(r"([0-9]{6,18})-([0-9a-f]{1,64})\.claim\.json")
_RECORD = re.compile(r"([0-9]{6,18})-([0-9a-f]{1,64})\.json")
_CHECKPOINT = re.compile(r"step-([0-9]{10,18})-g([0-9]{6,18})-([0-9a-f]{1,64})-p([0-9]{6,18})")

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
    return _parse_generation(_CLAIM, claim_key, name)


def parse_record_name(name: str) -> GenerationId | None:
    """Return whose record a name below ``generations/`` is; None if it is no record."""
    return _parse_generation(_RECORD, record_key, name)


def _parse_generation(
    pattern: re.Pattern[str], key_of: Callable[[GenerationId], str], name: str
) -> GenerationId | None:
    match = pattern.fullmatch(name)
    if not match:
        return None
    generation = GenerationId(int(match[1]), match[2])
    # "0000003" would be another name for 3, whose objects are elsewhere.
    return generation if key_of(generation) == f"{GENERATIONS}/{name}" else None


def checkpoint_prefix(ref: CheckpointRef) -> str:
    """Return the prefix that all keys of a checkpoint share, without a slash at its end."""
    return f"{CHECKPOINTS}/step-{ref.step:010d}-{ref.generation}-p{ref.plan_id:06d}"


def parse_checkpoint_name(name: str) -> CheckpointRef | None:
    """Return the checkpoint that a name below ``checkpoints/`` stands for, or None."""
    match = _CHECKPOINT.fullmatch(name)
    if not match:
        return None
    ref = CheckpointRef(int(match[1]), GenerationId(int(match[2]), match[3]), int(match[4]))
    return ref if checkpoint_prefix(ref) == f"{CHECKPOINTS}/{name}" else None


def manifest_key(ref: CheckpointRef) -> str:
    """Return the key whose existence is the commit."""
    return f"{checkpoint_prefix(ref)}/{MANIFEST}"


def checkpoint_name(ref: CheckpointRef) -> str:
    """Return the last part of a checkpoint's prefix: its name below ``checkpoints/``."""
    return checkpoint_prefix(ref).removeprefix(f"{CHECKPOINTS}/")


def registered_key(ref: CheckpointRef) -> str:
    """Return the key that says that a checkpoint is registered with Ray Train."""
    return f"{REGISTERED}/{checkpoint_name(ref)}.json"


def layout_copy_key(ref: CheckpointRef) -> str:
    """Return the key of the layout that a registered checkpoint carries with it."""
    return f"{checkpoint_prefix(ref)}/{LAYOUT_COPY}"


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

    accounts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the loaders consumed in this generation, as `core.audit` encodes it."""


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
        "accounts": manifest.accounts,
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
        found = CheckpointRef(fields["step"], GenerationId(number, id_), fields["plan_id"])
        if found != ref:
            raise ValueError(f"it is the manifest of {found}")
        manifest = Manifest(
            # Not what was read: 12.0 and True equal numbers, and are none in a key.
            ref=ref,
            world_size=fields["world_size"],
            layout_digest=fields["layout"],
            shards=tuple(ShardInfo(*row) for row in fields["shards"]),
            created_unix_s=float(fields["created_unix_s"]),
            write_id=fields["write_id"],
            metrics=fields["metrics"],
            # Only the audit reads them, and judges them itself; older manifests have none.
            accounts=fields.get("accounts", {}),
        )
        _check_manifest(manifest)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"step {ref.step}: {key} is damaged ({brief(error)}); an older checkpoint can be used",
            step=ref.step,
            key=key,
        ) from error
    return manifest


def brief(error: object) -> str:
    """Return the beginning of a text that may hold any part of damaged bytes."""
    text = str(error)
    return text if len(text) <= 300 else f"{text[:300]}..."


def is_whole(value: object, least: int = 0) -> bool:
    """Return whether ``value`` is a whole number from ``least`` on that fits 64 bits; True and 1.0 are none."""
    return type(value) is int and least <= value < 1 << 63


def _check_manifest(manifest: Manifest) -> None:
    if not is_whole(manifest.world_size, 1):
        raise ValueError(f"{manifest.world_size!r} ranks")
    if not re.fullmatch(r"[0-9a-f]{8,64}", manifest.layout_digest):
        raise ValueError(f"layout {manifest.layout_digest!r}")
    if not math.isfinite(manifest.created_unix_s):
        raise ValueError(f"created at {manifest.created_unix_s!r}")
    if type(manifest.write_id) is not str:
        raise ValueError(f"write id {manifest.write_id!r}")
    if type(manifest.metrics) is not dict or not all(map(_is_metric, manifest.metrics.values())):
        raise ValueError("metrics that are no numbers")
    if type(manifest.accounts) is not dict:
        raise ValueError("accounts that are none")
    if len(manifest.shards) != manifest.world_size:
        raise ValueError(f"{len(manifest.shards)} shards for {manifest.world_size} ranks")
    for rank, shard in enumerate(manifest.shards):
        # Also keeps a forged manifest from naming objects outside its checkpoint.
        if (
            not is_whole(shard.rank)
            or shard.rank != rank
            or shard.name != shard_name(rank, manifest.world_size)
        ):
            raise ValueError(f"shard {rank} is called {shard.name!r}")
        if not is_whole(shard.num_bytes, 1) or shard.num_bytes > MAX_OBJECT_BYTES:
            raise ValueError(f"shard {rank} has {shard.num_bytes!r} bytes")
        if not isinstance(shard.digest, str) or not re.fullmatch(r"[0-9a-f]{8}", shard.digest):
            raise ValueError(f"shard {rank} has the digest {shard.digest!r}")


def _is_metric(value: object) -> bool:
    # A loss may well be NaN.
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


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


def check_entries(entries: Iterable[Entry], manifest: Manifest) -> list[Entry]:
    """Return a layout's entries, which are boxes of tensors with their bytes inside the manifest's shards.

    Whoever plans reads from them, or makes room for a tensor, may rely on
    shapes and sizes: no tensor has more bytes than its boxes, and no box more
    than its shard. The first that is wrong ends it, so that many that say the
    same cost nothing.

    Raises:
        CorruptCheckpointError: If one is no such box.
    """
    checked: list[Entry] = []
    places: set[tuple[str, int, int]] = set()
    sizes = [shard.num_bytes for shard in manifest.shards]
    kinds: dict[tuple[str, int], tuple[str, tuple[int, ...], int]] = {}
    elements: dict[tuple[str, int], int] = {}
    for entry in entries:
        fault = _fault_of(entry, sizes)
        if fault is None:
            key = entry.name, entry.owner
            count = math.prod(entry.shape)
            elements[key] = elements.get(key, 0) + count
            item_bytes = entry.num_bytes // count if count else 0
            kind = entry.dtype, entry.global_shape, item_bytes
            known = kinds.setdefault(key, kind)
            if known[:2] != kind[:2] or (item_bytes and known[2] and item_bytes != known[2]):
                fault = "is of two kinds"
            elif item_bytes and not known[2]:
                kinds[key] = kind
            place = *key, entry.rank
            if place in places:
                fault = "is twice in one shard"
            places.add(place)
        if fault is not None:
            raise _corrupt_layout(manifest, f"{brief(repr(entry.name))} {fault}")
        checked.append(entry)
    for key, (_, shape, _) in kinds.items():
        if math.prod(shape) > elements[key]:
            raise _corrupt_layout(manifest, f"{brief(repr(key[0]))} lacks some of its elements")
    return checked


def _fault_of(entry: Entry, sizes: Sequence[int]) -> str | None:
    """Return what is wrong with an entry by itself."""
    if type(entry.name) is not str or type(entry.dtype) is not str:
        return "has no name or type"
    boxes = (entry.global_shape, entry.offset, entry.shape)
    if not all(type(number) is int for box in boxes for number in box):
        return "has a shape that is none"
    num_dimensions = len(entry.shape)
    if num_dimensions > MAX_DIMENSIONS or any(len(box) != num_dimensions for box in boxes):
        return "has a shape that is none"
    if any(
        offset < 0 or extent < 0 or offset + extent > whole
        for whole, offset, extent in zip(*boxes, strict=True)
    ):
        return "has a box outside its tensor"
    if not all(map(is_whole, (entry.rank, entry.begin, entry.num_bytes))) or entry.rank >= len(sizes):
        return "lies in no shard"
    if type(entry.owner) is not int or not -1 <= entry.owner < len(sizes):
        return "belongs to no rank"
    if entry.begin + entry.num_bytes > sizes[entry.rank]:
        return "lies outside its shard"
    count = math.prod(entry.shape)
    if entry.num_bytes % count if count else entry.num_bytes:
        return "has bytes that are no elements"
    if count and not 1 <= entry.num_bytes // count <= MAX_ITEM_BYTES:
        return "has elements of no size"
    return None


def _corrupt_layout(manifest: Manifest, what: str) -> CorruptCheckpointError:
    key = layout_key(manifest.layout_digest)
    return CorruptCheckpointError(
        f"step {manifest.ref.step}: {key} is damaged: {what}", step=manifest.ref.step, key=key
    )
