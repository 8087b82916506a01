"""What agents and the coordinator tell each other, beside the events of the protocol."""

from __future__ import annotations

import dataclasses
from typing import Any

from raycheck.core import protocol
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.notice import Notice
from raycheck.core.page import Plan

# From an agent to the coordinator.


@dataclasses.dataclass(frozen=True, slots=True)
class RankHere:
    """A rank is connected to this agent; told again after either end has restarted."""

    rank: int
    world_size: int
    step: int
    highest_plan_id: int
    uploading_plan_ids: tuple[int, ...]
    """Plans whose shards of this rank the agent holds; an agent before it took its own to the grave."""


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreAsked:
    """A rank wants to know what to restore."""

    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreReported:
    """A rank has verified its bytes, or has not."""

    rank: int
    ref: CheckpointRef | None
    error: str | None
    is_mismatch: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreEnded:
    """A rank holds what all ranks load, or begins at step 0; told just before it joins."""

    rank: int
    seconds: float | None = None
    """Time that ``attach`` took on this rank; None: its agent has restarted since and does not know."""

    num_bytes: int = 0
    """Read from storage for this rank."""

    num_memory_bytes: int = 0
    """Found in its node's memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class UploadsSeen:
    """How far a node's uploads for a plan are; told about once a second while there are any."""

    node: str
    plan_id: int
    ranks: tuple[int, ...]
    num_bytes_done: int
    num_bytes: int
    seconds: float
    """Since the first of them began."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepsMeasured:
    """Step records of a rank: (duration_s, stall_s, is_overlapped), oldest first."""

    rank: int
    step: int
    records: tuple[tuple[float, float, bool], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TableChanged:
    """A rank's shard has a new table: the rows of its entries."""

    rank: int
    rows: tuple[tuple[object, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MetricsTaken:
    """The user's metrics at a snapshot's step, and rank 0's accounts of the data."""

    rank: int
    plan_id: int
    metrics: dict[str, float]
    accounts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """By the loader's name in ``attach``, as `core.audit` encodes them; empty from other ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoticeHeard:
    """The end of a node or a worker was announced."""

    notice: Notice


Message = (
    RankHere
    | RestoreAsked
    | RestoreReported
    | RestoreEnded
    | UploadsSeen
    | StepsMeasured
    | TableChanged
    | MetricsTaken
    | NoticeHeard
    | protocol.Event
)

# From the coordinator to an agent.


@dataclasses.dataclass(frozen=True, slots=True)
class PublishPlan:
    """Show the plan to all ranks of this node."""

    plan: Plan
    is_held: bool = False
    """Whether they are to stand still at its step: the group is about to be stopped, and no step is to be lost."""

    spared: tuple[int, ...] = ()
    """Ranks that take no share of what all ranks hold alike: their nodes are about to go."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The attempt is over: stop uploads, free memory, and delete what is stored if it came to nothing."""

    plan: Plan
    is_committed: bool
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class OfferRestore:
    """These ranks are to read and verify this checkpoint; None: there is none."""

    ranks: tuple[int, ...]
    ref: CheckpointRef | None


@dataclasses.dataclass(frozen=True, slots=True)
class ProceedRestore:
    """All ranks are well: load."""

    ref: CheckpointRef | None


@dataclasses.dataclass(frozen=True, slots=True)
class RefuseRestore:
    """No rank may load anything."""

    message: str
    is_mismatch: bool


@dataclasses.dataclass(frozen=True, slots=True)
class AcceptSave:
    """Every rank waits for a checkpoint at this step."""

    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class KeepPerRank:
    """Shared tensors differ between ranks: store each rank's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class FinishTraining:
    """All ranks have closed; nothing more will be saved."""

    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class HaltTraining:
    """Training must stop."""

    reason: str
    is_fenced: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseTraining:
    """Nobody is stopped: ranks that stand still go on."""


Order = (
    PublishPlan
    | AttemptEnded
    | OfferRestore
    | ProceedRestore
    | RefuseRestore
    | AcceptSave
    | KeepPerRank
    | FinishTraining
    | HaltTraining
    | ReleaseTraining
)


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """A batch from one agent, in order. Delivered at least once."""

    node: str
    generation: GenerationId
    messages: tuple[Message, ...]
