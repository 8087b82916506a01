"""Checkpoints made by hand, for tests that need no training."""

from __future__ import annotations

from raycheck.core import layout, lineage
from raycheck.core.layout import Manifest, ShardInfo
from raycheck.core.lineage import CheckpointRef, GenerationId, GenerationRecord
from raycheck.store.run import RunStore


def begin(run: RunStore, parent: CheckpointRef | None = None, claimed_unix_s: float = 0.0) -> GenerationId:
    """Write a claim and a record."""
    tip = lineage.tip(run.records())
    generation = run.claim({"claimed_unix_s": claimed_unix_s})
    run.write_record(lineage.record_for(generation, world_size=1, parent=parent, tip_record=tip))
    return generation


def stage(run: RunStore, generation: GenerationId, step: int, plan_id: int = 1) -> CheckpointRef:
    """Write the shard of an attempt."""
    ref = CheckpointRef(step, generation, plan_id)
    run.store.put(f"{layout.checkpoint_prefix(ref)}/{layout.shard_name(0, 1)}", b"x" * 10)
    return ref


def commit(run: RunStore, generation: GenerationId, step: int, plan_id: int = 1) -> CheckpointRef:
    """Write a whole checkpoint."""
    ref = stage(run, generation, step, plan_id)
    shard = ShardInfo(0, layout.shard_name(0, 1), 10, "0" * 8)
    run.write_manifest(Manifest(ref, 1, run.write_layout([]), (shard,), 0.0, f"{step:08x}", {}))
    return ref


def selectable(run: RunStore) -> list[int]:
    """Return the steps that a start would choose from, best first."""
    tip: GenerationRecord | None = lineage.tip(run.records())
    return [ref.step for ref in lineage.selectable(tip, run.attempts()) if run.is_committed(ref)]
