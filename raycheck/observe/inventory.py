"""Reads what a run's store holds, for people who look after it."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

from raycheck.core import layout, lineage
from raycheck.core.inventory import Found, RunFacts, Stored, take_stock
from raycheck.core.lineage import CheckpointRef
from raycheck.errors import CorruptCheckpointError, ObjectNotFoundError
from raycheck.store.run import RunStore

_PARALLEL_READS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """A run, and all its checkpoints by step."""

    facts: RunFacts
    stock: list[Stored]


def read_inventory(run_store: RunStore) -> Inventory:
    """Return what is in the store. Blocks for storage: some listings, and a read per record and manifest.

    What a running job deletes meanwhile is left out.

    Raises:
        StorageError: If the store cannot be read.
    """
    # Checkpoints first: the records that are read afterwards know of all their generations.
    folders = _folders(run_store)
    committed = sorted(ref for ref, sizes in folders.items() if layout.MANIFEST in sizes)
    with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="raycheck-read") as pool:
        read = dict(zip(committed, pool.map(lambda ref: _read(run_store, ref), committed), strict=True))
    facts = read_facts(run_store)
    found = []
    for ref, sizes in folders.items():
        manifest, fault = read.get(ref) or (None, "")
        if manifest is None and not fault and ref in read:
            continue
        found.append(Found(ref=ref, sizes=sizes, manifest=manifest, fault=fault))
    return Inventory(facts, take_stock(facts, found))


def read_facts(run_store: RunStore) -> RunFacts:
    """Return what is known of a run besides its checkpoints. Blocks for storage."""
    claims = run_store.claims()
    names = run_store.store.list_children(layout.LAYOUTS)
    return RunFacts(
        tip=lineage.tip(run_store.records()),
        claims=frozenset(claims),
        has_ended=bool(claims) and run_store.end_facts(claims[-1]) is not None,
        layouts=frozenset(name.removesuffix(".parquet") for name in names),
        registered=frozenset(run_store.registered()),
    )


def _folders(run_store: RunStore) -> dict[CheckpointRef, dict[str, int]]:
    """Return the objects of each checkpoint, by name, from one listing."""
    folders: dict[CheckpointRef, dict[str, int]] = {}
    for info in run_store.store.list_keys(layout.CHECKPOINTS):
        folder, _, name = info.key.removeprefix(f"{layout.CHECKPOINTS}/").partition("/")
        ref = layout.parse_checkpoint_name(folder)
        if ref is not None and name:
            folders.setdefault(ref, {})[name] = info.size_bytes
    return folders


def _read(run_store: RunStore, ref: CheckpointRef) -> tuple[layout.Manifest | None, str]:
    """Return a manifest, or why it cannot be read; neither if it has been deleted."""
    try:
        return run_store.read_manifest(ref), ""
    except CorruptCheckpointError as error:
        return None, "" if isinstance(error.__cause__, ObjectNotFoundError) else str(error)
