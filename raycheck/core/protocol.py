"""How a checkpoint comes about: the coordinator's state machine, without I/O.

    idle ──Publish──▶ planned ──all staged──▶ persisting ──all durable──▶ committing ──▶ idle
                        │ missed, lost,          │ failed, lost before         │ not committed,
                        ▼ deadline               ▼ durable                     ▼ fenced
                       idle                     idle                          idle / halted

Events and the time go in, actions come out. Nobody waits for anybody: a plan
names a step far enough ahead that every rank should see it in time; a rank
that did not says so, the attempt ends, and the next plan has twice the lead.
Safety needs no agreement beyond this: a commit needs, for one plan, a durable
shard from every rank.

Events arrive at least once and in any order. One that speaks of another plan
than those in flight is ignored; one that cannot be true raises `ProtocolError`
and leaves the state unchanged.

Where ranks have memory for several snapshots, the next plan may be published
once every rank has staged the one before: that one is then on its way to
storage beside it. Each commits when it is whole, in whatever order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from raycheck.core.layout import ShardInfo
from raycheck.core.page import Plan

EndReason = Literal[
    "committed", "missed", "lost", "deadline", "failed", "data", "replicas", "closing", "superseded", "fenced"
]

# Why an attempt may end without anything being wrong with saving as such.
_HARMLESS: frozenset[EndReason] = frozenset(
    {"committed", "missed", "lost", "replicas", "closing", "superseded", "fenced"}
)

_MIN_LEAD_STEPS = 2
_NUM_SLOWEST = 8
_MAX_LEAD_S = 10.0
"""A plan further ahead would only cost checkpoints; ranks that see nothing for so long have other troubles."""


class ProtocolError(Exception):
    """An event that cannot be true."""


# Events.


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """A rank has restored and is about to train."""

    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A rank's process is gone. What it staged may still become durable."""

    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far the furthest rank of a node is, and how long a step takes there."""

    step: int
    step_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class SaveAsked:
    """The user asked for a checkpoint. A rank that waits for it stands still after ``step``."""

    rank: int
    step: int
    is_waiting: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
    """A rank's snapshot is complete in shared memory."""

    rank: int
    plan_id: int
    stall_s: float
    replica_digest: str
    """Digest over the sampled state that all ranks should hold alike."""

    step: int | None = None
    """The plan's step: a coordinator that has restarted may give one id again. None: not told."""

    place: str = ""
    """Where this rank is in its data: the same text on every rank, or they have come apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Durable:
    """A rank's shard is in the store."""

    plan_id: int
    shard: ShardInfo
    persist_s: float
    step: int | None = None
    """As in `Staged`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Missed:
    """A rank saw the plan after it had passed its step."""

    rank: int
    plan_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A rank's snapshot or upload failed for good."""

    rank: int
    plan_id: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CommitEnded:
    """The manifest was written and no newer claim was seen, or it was not."""

    plan_id: int
    error: str | None = None
    is_fenced: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """A rank's training function has ended normally after ``step`` steps."""

    rank: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Joined | Lost | Progress | SaveAsked | Staged | Durable | Missed | Failed | CommitEnded | Closed | Tick
)


# Actions.


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
    """Show every rank this plan."""

    plan: Plan


@dataclasses.dataclass(frozen=True, slots=True)
class WriteCommit:
    """Write layout and manifest, then look for newer claims; answer with `CommitEnded`."""

    plan: Plan
    shards: tuple[ShardInfo, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class EndAttempt:
    """The attempt is over: agents drop what is left of it and free its memory."""

    plan: Plan
    reason: EndReason
    detail: str
    stall_s: float = 0.0
    """Largest stall of any rank."""

    persist_s: float = 0.0
    """Longest persist of any rank."""

    num_bytes: int = 0
    """Bytes of the shards that are durable."""

    bytes_per_rank: int = 0
    """Bytes of the largest of them."""

    slowest_stalls: tuple[tuple[int, float], ...] = dataclasses.field(default=(), compare=False)
    """Ranks that were stalled longest, and for how many seconds; the longest first."""

    slowest_persists: tuple[tuple[int, float], ...] = dataclasses.field(default=(), compare=False)
    """Likewise, of their persists."""

    has_commit_begun: bool = dataclasses.field(default=False, compare=False)
    """A manifest may exist: what is stored must stay, whatever came of the attempt."""

    @property
    def is_committed(self) -> bool:
        """Whether a checkpoint came of it."""
        return self.reason == "committed"


@dataclasses.dataclass(frozen=True, slots=True)
class AcceptSave:
    """Every rank waits for a checkpoint at this step: it will be planned, go on waiting."""

    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class KeepPerRank:
    """Ranks hold different values where they should be alike: from now on each keeps its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
    """All ranks have closed and nothing is left to save."""

    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Halt:
    """Training must stop."""

    reason: str
    is_fenced: bool


Action = Publish | WriteCommit | EndAttempt | AcceptSave | KeepPerRank | Finish | Halt


@dataclasses.dataclass(slots=True)
class _Attempt:
    plan: Plan
    is_final: bool
    reached_s: float | None = None
    """When the first rank was seen at the step; the deadline counts from here."""

    staged: dict[int, Staged] = dataclasses.field(default_factory=dict)
    durable: dict[int, Durable] = dataclasses.field(default_factory=dict)
    is_committing: bool = False


class CommitProtocol:
    """Decides when to checkpoint, at which step, and whether it counts.

    Not thread-safe; the shell holds a lock around `handle`.

    Args:
        world_size: Ranks that must stage and persist.
        interval_steps: Fixed interval; None: `interval_s` decides.
        tolerated_failures: Failed saves in a row before training stops; None: any number.
        max_in_flight: Snapshots that every rank has memory for.
        latency_s: Time within which a published plan is expected to be seen
            by every rank, and how old `Progress` may be.
        first_plan_id: Above any id that this generation has used.
        start_step: The step at which this generation begins.
    """

    def __init__(
        self,
        *,
        world_size: int,
        interval_steps: int | None,
        tolerated_failures: int | None,
        latency_s: float,
        max_in_flight: int = 1,
        first_plan_id: int = 1,
        start_step: int = 0,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: must be at least 1")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight={max_in_flight}: must be at least 1")
        self.world_size = world_size
        self.interval_s: float | None = None
        """Time between snapshot starts, set by the policy; None: none is due yet."""

        self.committed_step: int | None = None
        """The newest step that this generation has committed."""

        self._start_step = start_step
        self.failures_in_a_row = 0
        self._interval_steps = interval_steps
        self._tolerated_failures = tolerated_failures
        self._latency_s = latency_s
        self._next_plan_id = first_plan_id
        self._joined: set[int] = set()
        self._closed: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._max_in_flight = max_in_flight
        self._attempt: _Attempt | None = None
        """The newest, unless all it needs is being stored and there is memory for another."""

        self._persisting: list[_Attempt] = []
        """Fully staged, beside `_attempt`; at most ``max_in_flight - 1``."""

        self._furthest_step = start_step
        self._furthest_seen_s: float | None = None
        self._step_s: float | None = None
        self._lead_factor = 1
        self._last_started_s: float | None = None
        self._is_asked = False
        self._is_retry = False
        self._is_over = False

    @property
    def plan(self) -> Plan | None:
        """The newest plan in flight, or None."""
        plans = self.plans
        return plans[-1] if plans else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans in flight, the oldest first."""
        return tuple(attempt.plan for attempt in self._in_flight)

    @property
    def is_fully_staged(self) -> bool:
        """Whether an attempt in flight needs nothing more from any worker."""
        return any(self._is_staged_whole(attempt) for attempt in self._in_flight)

    def is_staged(self, plan: Plan) -> bool:
        """Whether this plan is in flight and needs nothing more from any worker."""
        return any(self._is_staged_whole(attempt) for attempt in self._in_flight if attempt.plan == plan)

    def is_committing(self, plan: Plan) -> bool:
        """Whether a manifest of this plan is asked for and its end not known: it may exist."""
        return any(attempt.is_committing for attempt in self._in_flight if attempt.plan == plan)

    @property
    def _in_flight(self) -> list[_Attempt]:
        return [*self._persisting, self._attempt] if self._attempt else self._persisting

    def _is_staged_whole(self, attempt: _Attempt) -> bool:
        return len(attempt.staged) == self.world_size

    def skip_plans_to(self, plan_id: int) -> None:
        """Never use this plan id or a lower one: a coordinator before this one has."""
        self._next_plan_id = max(self._next_plan_id, plan_id + 1)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event and return what must be done, in order.

        Args:
            event: What happened.
            now_s: The coordinator's monotonic clock.

        Raises:
            ProtocolError: If the event cannot be true. The state is unchanged.
        """
        self._check(event)
        if self._is_over:
            return []
        actions = self._take(event, now_s)
        return actions + self._next(now_s)

    def _check(self, event: Event) -> None:
        rank = event.shard.rank if isinstance(event, Durable) else getattr(event, "rank", 0)
        if not 0 <= rank < self.world_size:
            raise ProtocolError(f"{event}: there are {self.world_size} ranks")
        plan_id = getattr(event, "plan_id", 0)
        if plan_id >= self._next_plan_id:
            raise ProtocolError(f"{event}: no plan beyond {self._next_plan_id - 1} was published")
        attempt = self._find(plan_id)
        if isinstance(event, CommitEnded) and attempt is not None and not attempt.is_committing:
            raise ProtocolError(f"{event}: no commit was asked for")

    def _find(self, plan_id: int) -> _Attempt | None:
        return next((attempt for attempt in self._in_flight if attempt.plan.id == plan_id), None)

    def _take(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case Joined():
                self._joined.add(event.rank)
            case Lost():
                return self._lost(event.rank)
            case Progress():
                self._progress(event, now_s)
                # Who takes another step has given up waiting.
                self._waiting = {r: s for r, s in self._waiting.items() if s >= event.step}
            case SaveAsked():
                return self._save_asked(event)
            case Closed():
                self._closed[event.rank] = event.step
            case Tick():
                return self._check_deadline(now_s)
            case _:
                return self._take_attempt_event(event, now_s)
        return []

    def _take_attempt_event(
        self, event: Staged | Durable | Missed | Failed | CommitEnded, now_s: float
    ) -> list[Action]:
        attempt = self._find(event.plan_id)
        if attempt is None:
            return []
        if isinstance(event, Staged | Durable) and event.step not in (None, attempt.plan.step):
            return []
        match event:
            case Staged():
                attempt.staged[event.rank] = event
                self._see_step(attempt.plan.step, now_s)
                return self._compare_ranks(attempt)
            case Durable():
                attempt.durable[event.shard.rank] = event
                return []
            case Missed() | Failed() if event.rank in attempt.durable and event.rank in attempt.staged:
                # Its part is done; the agent that says so has lost nothing that counts. A shard
                # that is stored before the verdict on its snapshot is not.
                return []
            case Missed():
                if self._latency_s * self._lead_factor < _MAX_LEAD_S:
                    self._lead_factor *= 2
                return self._end(attempt, "missed", f"rank {event.rank} saw the plan too late", retry=True)
            case Failed():
                return self._end(attempt, "failed", f"rank {event.rank}: {event.reason}")
            case CommitEnded():
                return self._commit_ended(attempt, event)

    def _save_asked(self, event: SaveAsked) -> list[Action]:
        if not event.is_waiting:
            self._is_asked = True
            return []
        self._waiting[event.rank] = event.step
        return [AcceptSave(event.step)] if self._all_wait_at() is not None else []

    def _all_wait_at(self) -> int | None:
        steps = set(self._waiting.values())
        return steps.pop() if len(self._waiting) == self.world_size and len(steps) == 1 else None

    def _progress(self, event: Progress, now_s: float) -> None:
        if event.step_s is not None:
            self._step_s = event.step_s
        self._see_step(event.step, now_s)

    def _see_step(self, step: int, now_s: float) -> None:
        if step >= self._furthest_step:
            self._furthest_step = step
            self._furthest_seen_s = now_s
        attempt = self._attempt
        if attempt and attempt.reached_s is None and step >= attempt.plan.step:
            attempt.reached_s = now_s

    def _lost(self, rank: int) -> list[Action]:
        self._joined.discard(rank)
        attempt = self._attempt
        if attempt is None or rank in attempt.staged:
            return []
        return self._end(attempt, "lost", f"rank {rank} ended before it had its snapshot")

    def _check_deadline(self, now_s: float) -> list[Action]:
        attempt = self._attempt
        if attempt is None or attempt.reached_s is None or self._is_staged_whole(attempt):
            return []
        if now_s - attempt.reached_s <= max(10.0, 20 * (self._step_s or 0)) + self._latency_s:
            return []
        missing = sorted(set(range(self.world_size)) - attempt.staged.keys())
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return self._end(attempt, "deadline", f"no snapshot from rank {shown} at step {attempt.plan.step}")

    def _compare_ranks(self, attempt: _Attempt) -> list[Action]:
        if not self._is_staged_whole(attempt):
            return []
        self._lead_factor = max(self._lead_factor // 2, 1)
        if len({staged.place for staged in attempt.staged.values()}) > 1:
            return self._end(attempt, "data", _describe_places(attempt.staged.values()))
        if len({staged.replica_digest for staged in attempt.staged.values()}) == 1:
            return []
        ended = self._end(
            attempt,
            "replicas",
            "ranks hold different values of one parameter: each keeps its own from now on",
            retry=True,
        )
        return [KeepPerRank(), *ended]

    def _commit_ended(self, attempt: _Attempt, event: CommitEnded) -> list[Action]:
        if event.is_fenced:
            self._is_over = True
            detail = event.error or "a newer start of this run exists"
            ended = [self._end(each, "fenced", detail) for each in [*self._in_flight]]
            return [*(action for actions in ended for action in actions), Halt(detail, is_fenced=True)]
        if event.error is not None:
            return self._end(attempt, "failed", event.error)
        # One that was begun later may have been faster.
        self.committed_step = max(attempt.plan.step, self.committed_step or 0)
        return self._end(attempt, "committed", "")

    def _end(self, attempt: _Attempt, reason: EndReason, detail: str, *, retry: bool = False) -> list[Action]:
        if attempt is self._attempt:
            self._attempt = None
            self._is_retry = retry
        else:
            self._persisting.remove(attempt)
        ended = EndAttempt(
            attempt.plan,
            reason,
            detail,
            stall_s=max((s.stall_s for s in attempt.staged.values()), default=0.0),
            persist_s=max((d.persist_s for d in attempt.durable.values()), default=0.0),
            num_bytes=sum(d.shard.num_bytes for d in attempt.durable.values()),
            bytes_per_rank=max((d.shard.num_bytes for d in attempt.durable.values()), default=0),
            slowest_stalls=_slowest((s.rank, s.stall_s) for s in attempt.staged.values()),
            slowest_persists=_slowest((d.shard.rank, d.persist_s) for d in attempt.durable.values()),
            has_commit_begun=attempt.is_committing,
        )
        actions: list[Action] = [ended]
        if reason == "committed":
            self.failures_in_a_row = 0
        elif reason not in _HARMLESS:
            self.failures_in_a_row += 1
            tolerated = self._tolerated_failures
            if tolerated is not None and self.failures_in_a_row > tolerated:
                self._is_over = True
                actions.append(
                    Halt(
                        f"{self.failures_in_a_row} saves in a row failed, the last one because {detail}; "
                        f"on_failure={tolerated} tolerates {tolerated}",
                        is_fenced=False,
                    )
                )
        if attempt.is_final:
            self._is_over = True
            actions.append(Finish(detail))
        return actions

    def _next(self, now_s: float) -> list[Action]:
        """Return what follows from the state as it now is."""
        if self._is_over:
            return []
        actions = self._commit_what_is_whole()
        attempt = self._attempt
        if (
            attempt is not None
            and self._is_staged_whole(attempt)
            and len(self._in_flight) < self._max_in_flight
        ):
            # What is left to do of it is the agents'.
            self._persisting.append(attempt)
            self._attempt = None
        elif attempt is not None and len(attempt.durable) == self.world_size:
            # Its verdicts are on their way, unless it commits already.
            return actions
        return actions or self._plan_next(now_s)

    def _commit_what_is_whole(self) -> list[Action]:
        actions: list[Action] = []
        for attempt in self._in_flight:
            is_whole = self._is_staged_whole(attempt) and len(attempt.durable) == self.world_size
            if is_whole and not attempt.is_committing:
                attempt.is_committing = True
                shards = tuple(attempt.durable[rank].shard for rank in range(self.world_size))
                actions.append(WriteCommit(attempt.plan, shards))
        return actions

    def _plan_next(self, now_s: float) -> list[Action]:
        if len(self._closed) == self.world_size:
            return self._close(now_s)
        if (step := self._all_wait_at()) is not None:
            return self._save_here(step, now_s)
        if self._attempt is not None:
            return self._supersede(self._attempt, now_s)
        if len(self._joined) < self.world_size or self._closed or not self._is_due(now_s):
            return []
        return self._publish(self._step_ahead(now_s), now_s)

    def _supersede(self, attempt: _Attempt, now_s: float) -> list[Action]:
        """Bring a plan forward that is still far off when the user asks for a checkpoint now."""
        if not self._is_asked or attempt.reached_s is not None or self._furthest_seen_s is None:
            return []
        step = self._step_ahead(now_s)
        if step >= attempt.plan.step:
            return []
        ended = self._end(attempt, "superseded", "a checkpoint was asked for earlier")
        return [*ended, *self._publish(step, now_s)]

    def _save_here(self, step: int, now_s: float) -> list[Action]:
        """Plan the step at which every rank stands and waits, once nothing else is in flight."""
        attempt = self._attempt
        actions: list[Action] = []
        if any(plan.step == step for plan in self.plans):
            return []
        if attempt is not None:
            if attempt.staged:
                return []
            actions = self._end(attempt, "superseded", "every rank waits for a checkpoint")
        self._waiting.clear()
        return actions + self._publish(step, now_s)

    def _close(self, now_s: float) -> list[Action]:
        attempt = self._attempt
        steps = set(self._closed.values())
        if attempt is not None:
            if attempt.staged or attempt.plan.step in steps:
                return []
            ended = self._end(attempt, "closing", "training ended before the planned step")
            return [*ended, *self._close(now_s)]
        if self._persisting:
            # The last one ends the run for all: it comes alone.
            return []
        if len(steps) == 1 and (step := steps.pop()) > self._start_step:
            return self._publish(step, now_s, is_final=True)
        self._is_over = True
        return [
            Finish("" if not steps else f"ranks ended at different steps: {sorted(self._closed.values())}")
        ]

    def _is_due(self, now_s: float) -> bool:
        if self._furthest_seen_s is None:
            return False
        if self._is_asked or self._is_retry or self._interval_steps is not None:
            return True
        if self.interval_s is None:
            return False
        return self._last_started_s is None or now_s >= self._last_started_s + self.interval_s

    def _step_ahead(self, now_s: float) -> int:
        """Return the nearest step that every rank should still see coming."""
        assert self._furthest_seen_s is not None
        step_s = self._step_s or self._latency_s
        unseen_steps = (now_s - self._furthest_seen_s) / step_s
        lead_s = min(self._latency_s * self._lead_factor, _MAX_LEAD_S)
        lead_steps = max(_MIN_LEAD_STEPS, math.ceil(lead_s / step_s))
        step = self._furthest_step + math.ceil(min(unseen_steps, self._latency_s * 4 / step_s)) + lead_steps
        if self._interval_steps is None or self._is_asked:
            return step
        return -(-step // self._interval_steps) * self._interval_steps

    def _publish(self, step: int, now_s: float, *, is_final: bool = False) -> list[Action]:
        plan = Plan(self._next_plan_id, step)
        self._next_plan_id += 1
        self._attempt = _Attempt(plan, is_final)
        self._last_started_s = now_s
        self._is_asked = self._is_retry = False
        return [Publish(plan)]


def _slowest(seconds: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return rank and seconds of the slowest ranks; among equals the lower rank."""
    return tuple(sorted(seconds, key=lambda each: (-each[1], each[0]))[:_NUM_SLOWEST])


def _describe_places(staged: Iterable[Staged]) -> str:
    ranks: dict[str, list[int]] = {}
    for one in sorted(staged, key=lambda one: one.rank):
        ranks.setdefault(one.place, []).append(one.rank)
    places = [
        f"rank {', '.join(map(str, some[:8]))}{', ...' if len(some) > 8 else ''} at {place or 'no position'!r}"
        for place, some in ranks.items()
    ]
    return (
        f"ranks are at different places in the data: {'; '.join(places[:8])}. Every rank must take the same "
        "batches from a loader that is passed to attach(): one that only some ranks use must be left out, and a "
        "look at a batch (next(iter(loader))) must be taken on all of them"
    )
