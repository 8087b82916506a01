"""A checkpointer's connection to the run: segment, snapshots, agent."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from raycheck.config import Settings
from raycheck.core.layout import Entry, ShardImage
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.page import Plan
from raycheck.data.adopt import DataWatch
from raycheck.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    FencedError,
    RaycheckError,
    SaveError,
    StateError,
)
from raycheck.runtime.link import RECONNECTED, AgentLink, adopt_segment
from raycheck.runtime.slots import Slots
from raycheck.state.codec import Codec
from raycheck.state.device import default_copier
from raycheck.state.memory import read_node_memory, snapshot_budget_bytes
from raycheck.state.restore import Restorer
from raycheck.state.segment import Segment
from raycheck.state.snapshot import Discarded, Snapshot, Snapshotter
from raycheck.state.tree import StateTree

logger = logging.getLogger("raycheck")

_WARN_EVERY_S = 30.0
_SAVE_TOGETHER_S = 1.0
_CLOSE_TIMEOUT_S = 600.0
_HOLD_AT_MOST_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What the callback leaves in each worker before the train function runs."""

    address: str
    generation: GenerationId
    rank: int
    world_size: int
    settings: Settings
    local_world_size: int = 1
    """Ranks on this node: they share its memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What ``attach`` put back on this rank."""

    step: int
    """Steps completed at the checkpoint."""

    generation: int
    """Number of the generation that wrote it."""

    seconds: float
    """Time that ``attach`` took to restore, in seconds, waiting for the slowest rank included."""

    source: str
    """From where this rank's part came: "storage"; "memory", what a former worker left on this node; or "both"."""

    num_bytes: int
    """Bytes read from storage for this rank: whole checksummed chunks, so a little more than it needs."""

    num_memory_bytes: int = 0
    """Bytes that were in this node's memory already."""


class Session:
    """What a rank does between ``attach`` and the end. Used by the training thread alone.

    Args:
        context: The run, as the callback left it in this process.
        tree: The live state.
        watch: The data positions among it.

    Raises:
        StateError: If something in the state cannot be saved; names its path.
        ConnectionError: If this node has no agent.
    """

    def __init__(self, context: WorkerContext, tree: StateTree, watch: DataWatch) -> None:
        self.tree = tree
        self._watch = watch
        self.step_number = 0
        self._context = context
        self._codec = Codec(context.settings.allow_pickle)
        self._segment = adopt_segment(
            address=context.address,
            generation=context.generation,
            rank=context.rank,
            world_size=context.world_size,
        )
        self._more_segments = [Segment() for _ in range(context.settings.max_in_flight - 1)]
        self._slots = Slots(context.settings.max_in_flight)
        self._slot = 0
        """Of the snapshot that was begun last, which is the one that anything is told of."""

        self._table: list[Any] | None = None
        self._seen_plan_id = 0
        self._metrics: Mapping[str, Any] = {}
        self._taken: dict[str, Any] = {}
        """What goes with the snapshot that was begun last: it is sent later, and training goes on meanwhile."""

        self._accepted_step: int | None = None
        """The step at which the coordinator knows every rank to wait."""

        self._ended_here: dict[str, Any] | None = None
        """What became of an attempt at the present step since a checkpoint was asked for."""

        self._has_closed = self._is_finished = False
        self._num_bytes_read = self._num_bytes_held = 0
        self._last_end_s = time.perf_counter()
        self._was_busy = False
        self._halt: RaycheckError | None = None
        self._snapshotter = Snapshotter(
            tree,
            self._segment,
            more_segments=self._more_segments,
            rank=context.rank,
            world_size=context.world_size,
            codec=self._codec,
            overlap=context.settings.overlap,
            on_layout=self._send_table,
            # The agent begins to write while the step goes on; the verdict before the update makes it count.
            on_copied=self._report_copied,
            on_settled=self._report_outcome,
            budget_bytes=_budget_bytes(context, held_bytes=self._segment.arena_bytes),
            copier=default_copier(),
        )
        try:
            self._snapshotter.check()
            self._link = AgentLink(
                address=context.address,
                segments=[self._segment, *self._more_segments],
                generation=context.generation,
                rank=context.rank,
                world_size=context.world_size,
                on_reconnect=self._resend_table,
            )
        except BaseException:
            self._snapshotter.close()
            self._close_segments()
            raise

    # Restoring.

    def restore(self) -> Restored | None:
        """Restore what all ranks agree on; return what it was."""
        started_s = time.perf_counter()
        try:
            restorer, ref = self._agree()
            if restorer is not None and ref is not None:
                if restorer.unmatched and self._context.rank == 0:
                    logger.warning(
                        "step %d is restored in part:\n  %s", ref.step, "\n  ".join(restorer.unmatched)
                    )
                restorer.load((ref.step, str(ref.generation)))
                self.step_number = ref.step
                self._segment.page.step = ref.step
        except BaseException:
            self.abandon()
            raise
        seconds = time.perf_counter() - started_s
        self._link.has_joined = True
        self._link.send(
            "joined",
            seconds=seconds,
            num_bytes=self._num_bytes_read,
            num_memory_bytes=self._num_bytes_held,
        )
        self._last_end_s = time.perf_counter()
        if ref is None:
            return None
        source = "both" if self._num_bytes_held and self._num_bytes_read else "storage"
        if self._num_bytes_held and not self._num_bytes_read:
            source = "memory"
        if self._context.rank == 0:
            logger.info(
                "restored step %d of generation %d from %s in %.2f s",
                ref.step,
                ref.generation.number,
                {"both": "memory and storage", "memory": "this node's memory"}.get(source, source),
                seconds,
            )
        return Restored(
            step=ref.step,
            generation=ref.generation.number,
            seconds=seconds,
            source=source,
            num_bytes=self._num_bytes_read,
            num_memory_bytes=self._num_bytes_held,
        )

    def _agree(self) -> tuple[Restorer | None, CheckpointRef | None]:
        """Follow the coordinator's offers until all ranks hold verified bytes of one checkpoint."""
        restorer: Restorer | None = None
        while True:
            message = self._next_message("the other ranks to restore")
            match message["op"]:
                case "offer":
                    restorer = self._take_offer(message)
                # A read of an earlier offer may end after the next offer has come.
                case "read_done" if restorer is not None and message["ref"] == self._offered_fields:
                    self._num_bytes_read = message.get("num_bytes", 0)
                    self._num_bytes_held = message.get("num_memory_bytes", 0)
                    self._check_read(restorer, message["error"])
                case "proceed":
                    return restorer, self._offered
                case "refuse":
                    kind = CheckpointMismatchError if message["is_mismatch"] else CheckpointError
                    raise kind(message["message"])

    def _take_offer(self, message: dict[str, Any]) -> Restorer | None:
        self._offered_fields = message["ref"]
        if message["ref"] is None:
            self._offered: CheckpointRef | None = None
            self._report(None)
            return None
        step, number, id_, plan_id = message["ref"]
        self._offered = CheckpointRef(step, GenerationId(number, id_), plan_id)
        has_group = dist.is_initialized() and dist.get_world_size() == self._context.world_size > 1
        try:
            restorer = Restorer(
                self.tree,
                self._segment,
                [Entry.from_row(row) for row in message["rows"]],
                saved_world_size=message["world_size"],
                rank=self._context.rank,
                world_size=self._context.world_size,
                codec=self._codec,
                has_group=has_group,
            )
            reads = [dataclasses.astuple(read) for read in restorer.plan()]
        except CheckpointMismatchError as error:
            self._report(str(error), is_mismatch=True)
            return None
        except (CorruptCheckpointError, OSError) as error:
            self._report(str(error))
            return None
        self._link.send("read", ref=message["ref"], reads=reads)
        return restorer

    def _check_read(self, restorer: Restorer, error: str | None) -> None:
        if error is not None:
            self._report(error)
            return
        try:
            restorer.check()
        except CheckpointMismatchError as mismatch:
            self._report(str(mismatch), is_mismatch=True)
        except CorruptCheckpointError as corrupt:
            self._report(str(corrupt))
        else:
            self._report(None)

    def _report(self, error: str | None, *, is_mismatch: bool = False) -> None:
        self._link.send("report", ref=self._offered_fields, error=error, is_mismatch=is_mismatch)

    def _next_message(self, what: str) -> dict[str, Any]:
        """Return the next message that a waiting worker acts on. Blocks; says so now and then."""
        waited_s = 0.0
        while True:
            message = self._link.receive(_WARN_EVERY_S)
            if message is None:
                waited_s += _WARN_EVERY_S
                logger.warning("rank %d has waited %.0f s for %s", self._context.rank, waited_s, what)
                continue
            if message["op"] not in (RECONNECTED, "ended"):
                return message

    # Saving.

    def step(self, metrics: Mapping[str, Any] | None) -> None:
        """Count a step; take what is due."""
        started_s = time.perf_counter()
        self.step_number += 1
        page = self._segment.page
        page.step = self.step_number
        if metrics is not None:
            self._metrics = metrics
        if self._link.has_mail:
            self._read_mail()
        self._report_outcome(self._snapshotter.settle(block=False))
        plan = page.plan
        if plan.id != self._seen_plan_id:
            self._follow(plan)
        ended_s = time.perf_counter()
        stall_s = ended_s - started_s + self._snapshotter.take_waited_s()
        is_busy = page.is_in_flight or self._snapshotter.is_pending
        page.record_step(ended_s - self._last_end_s, stall_s, is_overlapped=is_busy or self._was_busy)
        self._was_busy = is_busy
        self._last_end_s = ended_s
        if 0 < page.hold_step <= self.step_number:
            self._stand_still()
        if self._halt is not None:
            raise self._halt

    def _stand_still(self) -> None:
        """Wait to be stopped, with a snapshot taken or to come: each further step would be lost."""
        page = self._segment.page
        # The coordinator takes it back in time, unless it is gone.
        deadline_s = time.monotonic() + _HOLD_AT_MOST_S
        # Read anew each time: an order that is taken back may be followed at once by one for a later
        # step, which is reached only by going on.
        while 0 < page.hold_step <= self.step_number and self._halt is None and time.monotonic() < deadline_s:
            self._snapshot_here()
            self._read_mail()
        self._last_end_s = time.perf_counter()

    def tell_notice(self, source: str, seconds_left: float, detail: str) -> None:
        """Pass on that this process will end. Not for the training thread: called from another."""
        self._link.send("notice", source=source, seconds_left=seconds_left, detail=detail)

    def _follow(self, plan: Plan) -> None:
        if plan.step > self.step_number:
            return
        self._seen_plan_id = plan.id
        if plan.step < self.step_number:
            self._link.send("missed", plan_id=plan.id)
            return
        self._report_outcome(self._snapshotter.settle(block=True))
        # What freed an arena was sent before the plan that needs it was shown.
        self._read_mail()
        spared = self._segment.page.spared(plan.id)
        if self._segment.page.plan != plan:
            # Another has taken its place meanwhile, and who is spared may be that one's.
            self._link.send("missed", plan_id=plan.id)
            return
        self._slot = self._slots.take(plan.id)
        try:
            self._snapshotter.begin(plan, slot=self._slot, spared=spared)
            self._taken = {
                "metrics": self._metrics,
                "place": self._watch.place(),
                "accounts": self._watch.accounts() if self._context.rank == 0 else {},
            }
        except (StateError, OSError) as error:
            logger.warning("rank %d: no snapshot at step %d: %s", self._context.rank, self.step_number, error)
            self._link.send("failed", plan_id=plan.id, reason=str(error))

    def _report_copied(self, plan: Plan, num_bytes: int) -> None:
        self._link.send("copied", plan=list(plan), num_bytes=num_bytes, slot=self._slot)

    def _report_outcome(self, outcome: Snapshot | Discarded | None) -> None:
        match outcome:
            case Snapshot():
                self._link.send(
                    "staged",
                    plan=list(outcome.plan),
                    num_bytes=outcome.num_bytes,
                    slot=self._slot,
                    stall_s=outcome.stall_s,
                    replica_digest=outcome.replica_digest,
                    **{**self._taken, "metrics": _numbers(self._taken["metrics"])},
                )
            case Discarded(plan, reason):
                self._link.send("failed", plan_id=plan.id, reason=reason)

    def save(self, *, block: bool) -> bool:
        """Ask for a checkpoint; see `Checkpointer.save`."""
        self._ask(is_waiting=block)
        if not block:
            return False
        started_s = time.monotonic()
        while time.monotonic() < started_s + self._save_timeout_s():
            self._read_mail()
            if self._ended_here is not None:
                is_committed = bool(self._ended_here["is_committed"])
                if not is_committed:
                    logger.warning(
                        "no checkpoint at step %d: %s", self.step_number, self._ended_here["detail"]
                    )
                return is_committed
            self._snapshot_here()
        logger.warning(
            "rank %d: save(block=True) at step %d returns without a checkpoint: not every rank has called it "
            "at this step",
            self._context.rank,
            self.step_number,
        )
        return False

    def _ask(self, *, is_waiting: bool) -> None:
        self._accepted_step = self._ended_here = None
        self._link.send("ask", step=self.step_number, is_waiting=is_waiting)

    def _save_timeout_s(self) -> float:
        return _CLOSE_TIMEOUT_S if self._accepted_step == self.step_number else _SAVE_TOGETHER_S

    def close(self) -> None:
        """Take part in a last checkpoint and wait for its end."""
        self._report_outcome(self._snapshotter.settle(block=True))
        self._has_closed = True
        self._link.send("closed", step=self.step_number)
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while not self._is_finished and self._halt is None and time.monotonic() < deadline_s:
            self._read_mail()
            self._snapshot_here()
        self.abandon()
        if self._halt is not None:
            raise self._halt
        if not self._is_finished:
            logger.warning("rank %d: the last checkpoint was not confirmed", self._context.rank)

    def abandon(self) -> None:
        """Let go of everything; waits for a copy that is under way.

        The link goes last: once the agent sees its end, nothing writes to the segment any more.
        """
        self._snapshotter.close()
        self._link.close()
        self._close_segments()

    def _close_segments(self) -> None:
        for segment in (self._segment, *self._more_segments):
            segment.close()

    def _snapshot_here(self) -> None:
        """Take a snapshot if one is planned for the step at which this rank stands; waits a moment."""
        plan = self._segment.page.plan
        if plan.id != self._seen_plan_id:
            self._follow(plan)
        self._report_outcome(self._snapshotter.settle(block=True))
        time.sleep(0.005)

    def _read_mail(self) -> None:
        for message in self._link.drain():
            self._obey(message)

    def _obey(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "keep_per_rank":
                self._snapshotter.keep_per_rank()
            case "accept":
                self._accepted_step = message["step"]
            case "ended":
                plan_id, step = message["plan"]
                self._slots.free(plan_id)
                if step == self.step_number:
                    self._ended_here = message
            case "finish":
                self._is_finished = True
            case op if op == RECONNECTED:
                # Nobody reads what is left in them.
                self._slots.free_all()
                if self._has_closed:
                    self._link.send("closed", step=self.step_number)
            case "halt":
                kind = FencedError if message["is_fenced"] else SaveError
                self._halt = kind(message["reason"])

    def _send_table(self, image: ShardImage) -> None:
        self._table = [entry.to_row() for entry in image.entries]
        self._link.send("table", rows=self._table)

    def _resend_table(self) -> None:
        if self._table is not None:
            self._link.send("table", rows=self._table)


def _budget_bytes(context: WorkerContext, *, held_bytes: int) -> int:
    """Return what this rank's snapshot may take: its share of the node's limit or free memory.

    What an adopted segment has already is not free any more.
    """
    given_bytes = context.settings.node_memory_bytes
    if given_bytes is not None:
        return given_bytes // context.local_world_size
    return snapshot_budget_bytes(
        read_node_memory(),
        num_ranks=context.local_world_size,
        held_bytes=held_bytes,
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers. Only now, at a snapshot, is a tensor read."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
    return found
