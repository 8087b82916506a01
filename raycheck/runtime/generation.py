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
from raycheck.core.page import Plan

LATENCY_S = 0.3
"""How long a plan may take to be seen: pulse of the agents and two messages, with room."""


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
    metrics: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    accounts: tuple[int, dict[str, Any]] = (0, {})
    """The newest accounts of the data, and the plan that they are of."""

    joined_early: set[int] = dataclasses.field(default_factory=set)

    def may_commit(self, parent: CheckpointRef | None, settings: Settings) -> None:
        """Say what all ranks have restored, which is recorded: from now on this generation may commit."""
        tolerated = settings.on_failure
        self.parent = parent
        self.commits = protocol.CommitProtocol(
            world_size=self.world_size,
            interval_steps=settings.interval_steps,
            tolerated_failures=None if tolerated == "warn" else tolerated,
            latency_s=LATENCY_S,
            start_step=parent.step if parent else 0,
        )

    def accounts_of(self, plan_id: int) -> dict[str, Any]:
        """Return the accounts of the data that were taken for a plan; empty if there are none."""
        return self.accounts[1] if self.accounts[0] == plan_id else {}

    def manifest_of(self, plan: Plan, shards: tuple[ShardInfo, ...], *, created_unix_s: float) -> Manifest:
        """Return the manifest that commits a plan, its layout still to be named."""
        return Manifest(
            ref=CheckpointRef(plan.step, self.id, plan.id),
            world_size=self.world_size,
            layout_digest="",
            shards=shards,
            created_unix_s=created_unix_s,
            write_id=secrets.token_hex(8),
            metrics=self.metrics.get(0, {}),
            accounts=self.accounts_of(plan.id),
        )
