"""What the coordinator knows of the generation that is running."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from raycheck.config import Settings
from raycheck.core import protocol
from raycheck.core import restore as voting
from raycheck.core.layout import Entry, Manifest, ShardInfo
from raycheck.core.lineage import CheckpointRef, GenerationId, GenerationRecord
from raycheck.core.pace import Pace
from raycheck.core.page import Plan
from raycheck.runtime import messages

LATENCY_S = 0.3
"""How long a plan may take to be seen: pulse of the agents and two messages, with room."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What goes with one rank's snapshot."""

    table: tuple[Entry, ...]
    metrics: dict[str, float]
    accounts: dict[str, Any]


@dataclasses.dataclass(slots=True)
class Generation:
    """One start of a worker group. Changed by the coordinator's thread alone."""

    id: GenerationId
    world_size: int
    tip: GenerationRecord | None
    """The run as it stood when this generation started."""

    vote: voting.RestoreVote
    commits: protocol.CommitProtocol | None = None
    """None until the record is written: before that nothing may be committed."""

    parent: CheckpointRef | None = None
    tables: dict[int, tuple[Entry, ...]] = dataclasses.field(default_factory=dict)
    """The newest of each rank: snapshots in flight may have been laid out by the one before."""

    taken: dict[int, dict[int, Taken]] = dataclasses.field(default_factory=dict)
    """By the id of a plan in flight, and by rank."""

    node_of: dict[int, str] = dataclasses.field(default_factory=dict)
    """The node of each rank that has said where it is."""

    joined_early: set[int] = dataclasses.field(default_factory=set)
    pace: Pace = dataclasses.field(default_factory=Pace)
    planned_s: float | None = None
    """When the newest plan was published, by the coordinator's clock."""

    committed_s: float | None = None
    """When the newest checkpoint was committed, likewise."""

    loads: dict[int, messages.RestoreEnded] = dataclasses.field(default_factory=dict)
    """How the restore went, by rank."""

    uploads: dict[str, messages.UploadsSeen] = dataclasses.field(default_factory=dict)
    """How far uploads are, by node, as last told; of whatever plan."""

    untold_accounts: dict[str, Any] | None = None
    """What the parent says of the data, until all ranks have loaded it and that is told; None: it is."""

    def may_commit(self, parent: CheckpointRef | None, settings: Settings) -> None:
        """Say what all ranks have restored, which is recorded: from now on this generation may commit."""
        tolerated = settings.on_failure
        self.parent = parent
        self.commits = protocol.CommitProtocol(
            world_size=self.world_size,
            interval_steps=settings.interval_steps,
            tolerated_failures=None if tolerated == "warn" else tolerated,
            latency_s=LATENCY_S,
            max_in_flight=settings.max_in_flight,
            start_step=parent.step if parent else 0,
        )

    def see_step(self, step: int, now_s: float) -> None:
        """Take in how far ranks say that they are. What they say before they have loaded is no pace."""
        restored = self.parent.step if self.parent else 0
        if self.commits is not None and step >= restored:
            self.pace.observe(step, now_s)

    def take(self, message: messages.MetricsTaken) -> None:
        """Take in what goes with a rank's snapshot. Told again it changes nothing: its table may be another by then."""
        of_plan = self.taken.setdefault(message.plan_id, {})
        table = self.tables.get(message.rank, ())
        of_plan.setdefault(message.rank, Taken(table, message.metrics, message.accounts))

    def tables_of(self, plan_id: int) -> dict[int, tuple[Entry, ...]]:
        """Return by rank how the snapshots of a plan are laid out."""
        return {rank: taken.table for rank, taken in self.taken.get(plan_id, {}).items()}

    def accounts_of(self, plan_id: int) -> dict[str, Any]:
        """Return rank 0's accounts of the data that were taken for a plan; empty if there are none."""
        taken = self.taken.get(plan_id, {}).get(0)
        return taken.accounts if taken else {}

    def forget(self, plan_id: int) -> None:
        """Let go of what was taken for a plan whose attempt has ended, and for those before it that never began."""
        in_flight = {plan.id for plan in self.commits.plans} if self.commits else set()
        self.taken = {id_: of for id_, of in self.taken.items() if id_ > plan_id or id_ in in_flight}

    def manifest_of(self, plan: Plan, shards: tuple[ShardInfo, ...], *, created_unix_s: float) -> Manifest:
        """Return the manifest that commits a plan, its layout still to be named."""
        taken = self.taken.get(plan.id, {}).get(0)
        return Manifest(
            ref=CheckpointRef(plan.step, self.id, plan.id),
            world_size=self.world_size,
            layout_digest="",
            shards=shards,
            created_unix_s=created_unix_s,
            write_id=secrets.token_hex(8),
            metrics=taken.metrics if taken else {},
            accounts=self.accounts_of(plan.id),
        )
