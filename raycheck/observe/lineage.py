"""What a run's store says of the data: accounts along the lineage, for the audit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from raycheck.core import lineage
from raycheck.core.audit import Account, Stretch, decode_account
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.errors import CheckpointError
from raycheck.observe.events import read_events
from raycheck.store.run import RunStore


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The part of a run that counts."""

    stretches: tuple[Stretch, ...]
    damaged: tuple[str, ...]
    """Accounts that could not be read."""


def read_history(run_store: RunStore) -> History:
    """Return the generations that count, with their accounts. Blocks for storage.

    An account is taken from the telemetry, and where that has lost it, from the
    checkpoint itself.

    Raises:
        StorageError: If the store cannot be read.
    """
    records = run_store.records()
    tip = lineage.tip(records)
    if tip is None:
        return History(stretches=(), damaged=())
    sources = _Sources(run_store)
    by_id = {record.generation: record for record in records}
    ends = _ends(tip, by_id, sources.newest(tip.generation))
    stretches = []
    from_step = 0
    for generation, end in ends:
        record = by_id.get(generation)
        stretches.append(
            Stretch(
                generation=str(generation),
                from_step=from_step,
                to_step=end.step,
                world_size=record.world_size if record else 0,
                accounts=sources.accounts(end),
            )
        )
        from_step = end.step
    return History(stretches=tuple(stretches), damaged=tuple(sources.damaged))


def _ends(
    tip: lineage.GenerationRecord,
    records: Mapping[GenerationId, lineage.GenerationRecord],
    newest: CheckpointRef | None,
) -> list[tuple[GenerationId, CheckpointRef]]:
    """Return each generation that counts with the checkpoint where the next one went on; the tip's is its newest."""
    successors = [*(ancestor.generation for ancestor in tip.chain), tip.generation][1:]
    ends = []
    for ancestor, successor in zip(tip.chain, successors, strict=True):
        record = records.get(successor)
        parent = record.parent if record else None
        # A record that is lost leaves the step; which attempt it was is then unknown.
        end = parent or CheckpointRef(ancestor.left_at_step, ancestor.generation, -1)
        ends.append((ancestor.generation, end))
    if newest is not None:
        ends.append((tip.generation, newest))
    return ends


class _Sources:
    """Accounts by checkpoint, from telemetry and manifests."""

    def __init__(self, run_store: RunStore) -> None:
        self._run_store = run_store
        self.damaged: list[str] = []
        self._told: dict[tuple[str, int, int], Any] = {}
        for event in read_events(run_store.store):
            try:
                self._take(event)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self.damaged.append(f"an event of {event.get('generation')!r} cannot be read: {error!r}")

    def _take(self, event: Mapping[str, Any]) -> None:
        facts = event["facts"]
        if event["kind"] == "checkpoint" and "accounts" in facts:
            step, plan_id = int(facts["step"]), int(facts["plan_id"])
            self._told[str(event["generation"]), step, plan_id] = facts["accounts"]
        elif event["kind"] == "restored" and facts.get("parent"):
            step, generation, plan_id = facts["parent"]
            key = str(generation), int(step), int(plan_id)
            self._told.setdefault(key, facts["parent_accounts"])

    def newest(self, generation: GenerationId) -> CheckpointRef | None:
        """Return the newest checkpoint of a generation that anything tells of."""
        told = [CheckpointRef(step, generation, plan) for g, step, plan in self._told if g == str(generation)]
        there = [
            ref
            for ref in self._run_store.attempts()
            if ref.generation == generation and self._run_store.is_committed(ref)
        ]
        return max([*told, *there], default=None)

    def accounts(self, ref: CheckpointRef) -> dict[str, Account] | None:
        """Return the accounts of a checkpoint; None if nothing is known."""
        told = self._told.get((str(ref.generation), ref.step, ref.plan_id))
        if not told:
            try:
                told = self._run_store.read_manifest(ref).accounts
            except CheckpointError:
                return None
        found = {}
        for name, fields in told.items() if isinstance(told, dict) else ():
            try:
                found[str(name)] = decode_account(fields)
            except ValueError as error:
                self.damaged.append(f"step {ref.step} of {ref.generation}: {name!r}: {error}")
        return found
