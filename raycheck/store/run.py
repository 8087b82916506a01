"""A run's records in its store: claims, generations, manifests, layouts.

`core.layout` says which keys and bytes there are; this file reads and writes
them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raycheck.core import layout, lineage
from raycheck.core.layout import Entry, Manifest
from raycheck.core.lineage import CheckpointRef, GenerationId, GenerationRecord
from raycheck.core.sums import ChunkSums
from raycheck.errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from raycheck.store.objects import Store
from raycheck.store.retry import PATIENT
from raycheck.store.tables import iter_rows

logger = logging.getLogger("raycheck")

_ROW_COLUMNS = ("name", "dtype", "global_shape", "offset", "shape", "owner", "rank", "begin", "num_bytes")
_LAYOUT_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("dtype", pa.string()),
        ("global_shape", pa.list_(pa.int64())),
        ("offset", pa.list_(pa.int64())),
        ("shape", pa.list_(pa.int64())),
        ("owner", pa.int32()),
        ("rank", pa.int32()),
        ("begin", pa.int64()),
        ("num_bytes", pa.int64()),
    ]
)


class RunStore:
    """The records of one run. Every call blocks for storage; all raise `StorageError`."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def patient(self) -> RunStore:
        """Return the same records, with calls that wait for a store that does not answer: see `PATIENT`."""
        return RunStore(self.store.with_retry(PATIENT))

    def claims(self) -> list[GenerationId]:
        """Return all claims, freshly listed."""
        names = self.store.list_children(layout.GENERATIONS)
        return sorted(filter(None, map(layout.parse_claim_name, names)))

    def claim(self, facts: dict[str, Any]) -> GenerationId:
        """Write a claim with the next number and return it.

        Two that claim at once may get one number; their ids order them.

        Args:
            facts: For people: when and where this start happened.
        """
        generation = GenerationId(lineage.next_number(self.claims()), secrets.token_hex(4))
        self.store.put(layout.claim_key(generation), json.dumps(facts, indent=1).encode())
        return generation

    def claim_facts(self, generation: GenerationId) -> dict[str, Any]:
        """Return what a claim was written with; empty if it is damaged."""
        return self._facts(layout.claim_key(generation))

    def write_end(self, generation: GenerationId, facts: dict[str, Any]) -> None:
        """Write that a generation has come to its normal end."""
        self.store.put(layout.end_key(generation), json.dumps(facts, indent=1).encode())

    def end_facts(self, generation: GenerationId) -> dict[str, Any] | None:
        """Return what `write_end` wrote; None if the generation has not ended normally."""
        try:
            return self._facts(layout.end_key(generation))
        except ObjectNotFoundError:
            return None

    def _facts(self, key: str) -> dict[str, Any]:
        try:
            facts = json.loads(self.store.get(key))
        except (ValueError, RecursionError, CorruptCheckpointError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def records(self) -> list[GenerationRecord]:
        """Return all readable generation records, freshly listed."""
        found = []
        for name in self.store.list_children(layout.GENERATIONS):
            generation = layout.parse_record_name(name)
            if generation is None:
                continue
            key = f"{layout.GENERATIONS}/{name}"
            try:
                record = GenerationRecord.from_dict(json.loads(self.store.get(key)))
                if record.generation != generation:
                    raise ValueError(f"it is the record of {record.generation}")
                found.append(record)
            except (ValueError, RecursionError, CorruptCheckpointError) as error:
                logger.warning("%s is damaged and left out: %s", key, layout.brief(error))
        return found

    def write_record(self, record: GenerationRecord) -> None:
        """Write a generation's record: from now on it may commit, and it is the tip."""
        self.store.put(layout.record_key(record.generation), json.dumps(record.to_dict(), indent=1).encode())

    def attempts(self) -> list[CheckpointRef]:
        """Return everything below ``checkpoints/``, committed or not, freshly listed."""
        names = self.store.list_children(layout.CHECKPOINTS)
        return sorted(filter(None, map(layout.parse_checkpoint_name, names)))

    def is_committed(self, ref: CheckpointRef) -> bool:
        """Whether the manifest exists."""
        try:
            self.store.size_bytes(layout.manifest_key(ref))
        except ObjectNotFoundError:
            return False
        return True

    def read_manifest(self, ref: CheckpointRef) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            CorruptCheckpointError: If it is missing or damaged.
        """
        key = layout.manifest_key(ref)
        try:
            data = self.store.get(key)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(
                f"step {ref.step} is incomplete: {key} does not exist", step=ref.step, key=key
            ) from error
        return layout.decode_manifest(data, ref)

    def write_manifest(self, manifest: Manifest) -> None:
        """Commit. A lost reply is not a failure: what is stored decides.

        Raises:
            StorageError: If the manifest is not in the store, as far as can be seen.
        """
        key = layout.manifest_key(manifest.ref)
        try:
            self.store.put(key, layout.encode_manifest(manifest))
        except StorageError:
            try:
                stored = self.read_manifest(manifest.ref)
            except (StorageError, CorruptCheckpointError):
                stored = None
            if stored is None or stored.write_id != manifest.write_id:
                raise

    def read_layout(self, manifest: Manifest) -> list[Entry]:
        """Return the entries of a checkpoint's layout.

        Raises:
            CorruptCheckpointError: If it is missing or damaged.
        """
        key = layout.layout_key(manifest.layout_digest)
        step = manifest.ref.step
        try:
            data = self.store.get(key)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(
                f"step {step} is incomplete: {key} does not exist", step=step, key=key
            ) from error
        entries = parse_layout(data, manifest)
        if layout_digest(entries) != manifest.layout_digest:
            raise CorruptCheckpointError(f"step {step}: {key} is not what was written", step=step, key=key)
        return entries

    def write_layout(self, entries: Sequence[Entry]) -> str:
        """Write a layout and return its digest."""
        rows = [dict(zip(_ROW_COLUMNS, entry.to_row(), strict=True)) for entry in entries]
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=_LAYOUT_SCHEMA), sink, compression="zstd")
        digest = layout_digest(entries)
        self.store.put(layout.layout_key(digest), sink.getvalue())
        return digest

    def read_sums(self, manifest: Manifest, rank: int) -> ChunkSums:
        """Return the checksums of a shard.

        Raises:
            CorruptCheckpointError: If they are missing or are not those that were committed.
        """
        shard = manifest.shards[rank]
        key = f"{layout.checkpoint_prefix(manifest.ref)}/{layout.sums_name(shard.name)}"
        try:
            sums = ChunkSums.decode(self.store.get(key))
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(
                f"step {manifest.ref.step} is incomplete: {key} does not exist",
                step=manifest.ref.step,
                key=key,
            ) from error
        if sums.size_bytes != shard.num_bytes or sums.digest() != shard.digest:
            raise CorruptCheckpointError(
                f"step {manifest.ref.step}: {key} is not what was committed", step=manifest.ref.step, key=key
            )
        return sums

    def registered(self) -> list[CheckpointRef]:
        """Return the checkpoints that Ray Train has been given, freshly listed, oldest first."""
        names = self.store.list_children(layout.REGISTERED)
        found = (
            layout.parse_checkpoint_name(name.removesuffix(".json"))
            for name in names
            if name.endswith(".json")
        )
        return sorted(filter(None, found))

    def registered_facts(self, ref: CheckpointRef) -> dict[str, Any]:
        """Return what a registration was written with; empty if it is gone or damaged."""
        try:
            return self._facts(layout.registered_key(ref))
        except ObjectNotFoundError:
            return {}

    def write_registered(self, manifest: Manifest) -> None:
        """Hand a checkpoint over to Ray Train: from now on it is not ours to delete.

        It gets a copy of its layout first, so that its folder can be read alone.

        Raises:
            StorageError: If the record could not be written; it may be there all the same.
        """
        ref = manifest.ref
        self.store.put(layout.layout_copy_key(ref), self.store.get(layout.layout_key(manifest.layout_digest)))
        facts = {
            "format": 1,
            "step": ref.step,
            "created_unix_s": manifest.created_unix_s,
            "metrics": manifest.metrics,
        }
        self.store.put(layout.registered_key(ref), json.dumps(facts, indent=1).encode())

    def delete_registered(self, ref: CheckpointRef) -> None:
        """Take back what Ray Train does not hold; the checkpoint itself is left as it is."""
        self.store.delete([layout.registered_key(ref)])

    def sweep(self, mine: GenerationId, *, older_than_s: float, now_unix_s: float) -> list[str]:
        """Delete what earlier generations left without a commit; return its keys.

        Touches attempts without a manifest, and multipart uploads under way,
        below this root alone. Only those of generations whose claim is here and
        that a newer claim cut off more than ``older_than_s`` ago: such a writer
        can commit nothing any more, even if it is still alive. What was copied
        here without its claim is left alone, as is every committed checkpoint.

        Args:
            mine: The generation that sweeps; nothing of it or of a newer one is touched.
            older_than_s: The grace time, seconds.
            now_unix_s: The wall clock, which claims are stamped with.
        """
        cut_off = self._cut_off(mine, now_unix_s - older_than_s)
        keys: list[str] = []
        for ref in self.attempts():
            if ref.generation in cut_off and not self.is_committed(ref):
                left = [info.key for info in self.store.list_keys(layout.checkpoint_prefix(ref))]
                self.store.delete(left)
                keys += left
        return keys + self.store.sweep_uploads(older_than_s)

    def _cut_off(self, mine: GenerationId, before_unix_s: float) -> set[GenerationId]:
        """Return the generations below the newest one, ``mine`` at most, that was claimed before then."""
        claims = [claim for claim in self.claims() if claim <= mine]
        # Newest first: only as many claims are read as are younger than the grace time.
        for index in range(len(claims) - 1, 0, -1):
            claimed_unix_s = self.claim_facts(claims[index]).get("claimed_unix_s")
            if isinstance(claimed_unix_s, int | float) and claimed_unix_s <= before_unix_s:
                return set(claims[:index])
        return set()

    def delete(self, ref: CheckpointRef) -> None:
        """Delete a checkpoint, or what is left of an attempt.

        The manifest goes first, so that a half-deleted checkpoint is none.
        """
        prefix = layout.checkpoint_prefix(ref)
        manifest = layout.manifest_key(ref)
        self.store.delete([manifest])
        self.store.delete([info.key for info in self.store.list_keys(prefix) if info.key != manifest])


def parse_layout(data: bytes, manifest: Manifest) -> list[Entry]:
    """Return the entries that a layout's object holds; whether it is the one of its digest is not looked at.

    Raises:
        CorruptCheckpointError: If it is damaged, or does not fit the manifest.
    """
    max_rows = layout.MAX_ENTRIES_PER_SHARD * manifest.world_size
    try:
        rows = iter_rows(data, _LAYOUT_SCHEMA, max_rows=max_rows)
        return layout.check_entries(map(Entry.from_row, rows), manifest)
    except ValueError as error:
        key = layout.layout_key(manifest.layout_digest)
        step = manifest.ref.step
        raise CorruptCheckpointError(
            f"step {step}: {key} is damaged: {layout.brief(error)}", step=step, key=key
        ) from error


def layout_digest(entries: Iterable[Entry]) -> str:
    """Return the name of a layout: a digest of its rows."""
    text = json.dumps([entry.to_row() for entry in entries], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
