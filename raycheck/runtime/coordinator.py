"""The coordinator: one per run. Decides when, at which step, and what is committed.

It holds the pure state machines of `core` and feeds them in one thread; that
thread never waits for storage. No Ray in here; `runtime.actors` puts it into
a Ray actor. When it is killed it comes back empty, learns from the agents who
is there and from the store what counts, and goes on; an attempt that was
under way is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from raycheck.config import Settings
from raycheck.core import layout, lineage, protocol
from raycheck.core import restore as voting
from raycheck.core.failure_rate import FailureKind, FailureRate
from raycheck.core.interval import DAY_S
from raycheck.core.layout import Entry, Manifest
from raycheck.core.lineage import CheckpointRef, GenerationId, GenerationRecord
from raycheck.core.retention import to_delete
from raycheck.errors import CheckpointError, FencedError, StateError, StorageError
from raycheck.observe.events import EventLog
from raycheck.runtime import messages
from raycheck.runtime.tuner import Tuner
from raycheck.store.run import RunStore

logger = logging.getLogger("raycheck")

_TICK_S = 0.2
_LATENCY_S = 0.3
"""How long a plan may take to be seen: pulse of the agents and two messages, with room."""

_TELEMETRY_EVERY_S = 10.0
"""How much telemetry a killed coordinator may lose, seconds."""

_SWEEP_OLDER_THAN_S = 3600.0
"""Remains of generations that were cut off so long ago are nobody's."""

_STAGED_WAIT_S = 30.0
"""How long a new generation waits for the commit of what the one before has fully staged."""


@dataclasses.dataclass(slots=True)
class _Generation:
    """What the coordinator knows of the generation that is running."""

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


class Coordinator:
    """Runs until closed; every method is thread-safe.

    Args:
        run_store: The run's store.
        settings: As the user chose them.
        send: Hands an order to the agent of a node. Must not block or raise.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        run_store: RunStore,
        settings: Settings,
        send: Callable[[str, messages.Order], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_store = run_store
        self._settings = settings
        self._send = send
        self._clock = clock
        self._nodes: set[str] = set()
        self._generation: _Generation | None = None
        self._has_begun = False
        self._last_step_seen_s: float | None = None
        self._restarting_since_s: float | None = None
        self._committed: list[CheckpointRef] = []
        self._created_unix_s: dict[CheckpointRef, float] = {}
        """When checkpoints were committed; read from the store only where retention asks for it."""

        self._tuner = Tuner(settings)
        self._events = EventLog(run_store.store if settings.telemetry else None)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._last_layout: tuple[tuple[Entry, ...], str] | None = None
        self._storage = ThreadPoolExecutor(max_workers=2, thread_name_prefix="raycheck-storage")
        # Of its own, so that deleting never delays saving.
        self._deletion = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raycheck-delete")
        self._thread = threading.Thread(target=self._run, name="raycheck-coordinator", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Find out before the first step whether this run can work. Blocks for storage.

        Raises:
            ConfigError, StorageError: If the store cannot be used.
            CheckpointNotFoundError: If the step to resume from does not exist.
        """
        self._run_store.store.probe()
        self._find_candidates(self._resume)

    def begin_generation(
        self,
        nodes: set[str],
        world_size: int,
        *,
        has_lost_agents: bool = False,
        failure: FailureKind | None = "worker",
    ) -> GenerationId:
        """Claim a generation for a worker group that is about to start.

        Blocks for storage, and up to half a minute for the commit of what the
        generation before has staged completely.

        Args:
            nodes: Ids of the nodes that have workers.
            world_size: Number of ranks.
            has_lost_agents: An agent of the generation before is gone, and
                what it had staged with it: there is nothing to wait for.
            failure: What ended the generation before, if there was one; None: a resize.

        Raises:
            StorageError: If the claim could not be written.
        """
        started_s = self._clock()
        if not has_lost_agents:
            self._await_staged()
        if not self._has_begun:
            self._tuner.remember(self._recall_failure_rate())
        elif failure is not None:
            # Before the claim, which is what the next job remembers.
            self._tuner.observe_failure(failure)
        generation_id = self._run_store.claim(
            {
                "claimed_unix_s": time.time(),
                "world_size": world_size,
                "host": socket.gethostname(),
                "failure_rate": self._tuner.failure_rate.to_dict(),
                # For a coordinator that has to take over before the restore is over.
                "resume": self._resume,
            }
        )
        candidates, tip = self._find_candidates(self._resume)
        vote = voting.RestoreVote(
            world_size=world_size,
            candidates=candidates,
            is_exact=isinstance(self._resume, int),
        )
        self._has_begun = True
        generation = _Generation(generation_id, world_size, tip, vote)
        done: Future[None] = Future()
        self._inbox.put(lambda: self._enter(generation, nodes, done))
        done.result()
        self._deletion.submit(self._sweep, generation_id)
        self._events.record("begun", str(generation_id), seconds=self._clock() - started_s)
        return generation_id

    def receive(self, delivery: messages.Delivery) -> bool:
        """Take a batch from an agent. Returns at once.

        Returns:
            False if this coordinator does not know the generation, or this
            node's part of it: it has restarted, and wants to hear of everyone again.
        """
        known = self._generation
        # Also of a node that has not spoken yet when another had this coordinator take the generation up.
        is_known = known is not None and (delivery.node in self._nodes or delivery.generation != known.id)
        if not is_known:
            self._inbox.put(lambda: self._adopt(delivery))
        self._inbox.put(lambda: self._take(delivery))
        return is_known

    def status(self) -> dict[str, Any]:
        """Return what is going on, as plain values, for people and tests."""
        generation = self._generation
        commits = generation.commits if generation else None
        plan = commits.plan if commits else None
        return {
            "generation": str(generation.id) if generation else None,
            "world_size": generation.world_size if generation else 0,
            "restored_step": generation.parent.step if generation and generation.parent else None,
            "committed_step": commits.committed_step if commits else None,
            "plan": list(plan) if plan else None,
            "failures_in_a_row": commits.failures_in_a_row if commits else 0,
            **self._tuner.status(),
        }

    def close(self) -> None:
        """Write what is left to write and stop. Blocks for storage."""
        self._inbox.put(None)
        self._thread.join()
        self._storage.shutdown()
        self._deletion.shutdown()
        self._events.record("closed", self._generation_text(), **self._tuner.status())
        self._events.flush()

    # Starting.

    @property
    def _resume(self) -> int | str:
        # Only the first start of a run goes where the user says; after a failure it goes on from its own.
        return "auto" if self._has_begun else self._settings.resume

    def _find_candidates(self, resume: int | str) -> tuple[list[CheckpointRef], GenerationRecord | None]:
        tip = lineage.tip(self._run_store.records())
        usable = []
        attempts = self._run_store.attempts()
        for ref in lineage.selectable(tip, attempts):
            if self._run_store.is_committed(ref):
                usable.append(ref)
            else:
                logger.warning("step %d is incomplete, it has no manifest: left out", ref.step)
        self._committed = sorted(usable)
        if self._settings.keep_every_s is not None:
            self._read_times()
        if resume == "auto" and not usable:
            self._check_nothing_is_lost(tip, attempts)
        return lineage.candidates(resume, usable), tip

    def _read_times(self) -> None:
        for ref in self._committed:
            if ref in self._created_unix_s:
                continue
            try:
                self._created_unix_s[ref] = self._run_store.read_manifest(ref).created_unix_s
            except (CheckpointError, StorageError) as error:
                logger.warning("step %d is kept: when it was committed cannot be read: %s", ref.step, error)

    def _check_nothing_is_lost(self, tip: GenerationRecord | None, attempts: list[CheckpointRef]) -> None:
        """Refuse to start at step 0 what has been further, unless the user says so."""
        if tip is not None and tip.parent is not None:
            raise CheckpointError(
                f"generation {tip.generation} of this run restored step {tip.parent.step}, but no checkpoint of "
                'its lineage is left in the store; put them back, or set resume="fresh" to start at step 0',
                step=tip.parent.step,
            )
        if tip is None and any(map(self._run_store.is_committed, attempts)):
            raise CheckpointError(
                f"{self._run_store.store.url} holds checkpoints but no record in {layout.GENERATIONS}/ that says "
                "which of them count; if they were copied, copy that folder as well, or set "
                'resume="fresh" to start at step 0'
            )

    def _recall_failure_rate(self) -> FailureRate:
        """Return what earlier jobs of this run have seen of failures, the last one's own end included."""
        rate = self._tuner.failure_rate
        claims = self._run_store.claims()
        if not claims:
            return rate
        last = claims[-1]
        facts, end = self._run_store.claim_facts(last), self._run_store.end_facts(last)
        try:
            if end is not None:
                return FailureRate.from_dict(end["failure_rate"])
            # It failed, and ran at least until its last checkpoint.
            seen_s = [
                self._run_store.read_manifest(ref).created_unix_s
                for ref in self._run_store.attempts()
                if ref.generation == last and self._run_store.is_committed(ref)
            ]
            ran_s = max(max(seen_s, default=0.0) - facts["claimed_unix_s"], 0.0)
            return FailureRate.from_dict(facts["failure_rate"]).after(
                gpu_days=ran_s * facts["world_size"] / DAY_S, failures={"worker": 1}
            )
        except (KeyError, TypeError, ValueError, OverflowError, CheckpointError) as error:
            logger.warning("the failure rate of earlier starts cannot be read and starts anew: %s", error)
            return rate

    def _await_staged(self) -> None:
        deadline_s = self._clock() + _STAGED_WAIT_S
        with self._changed:
            while (
                self._generation is not None
                and self._generation.commits is not None
                and self._generation.commits.is_fully_staged
                and self._clock() < deadline_s
            ):
                self._changed.wait(_TICK_S)

    def _enter(self, generation: _Generation, nodes: set[str], done: Future[None]) -> None:
        previous = self._generation
        if previous is not None and previous.commits is not None and previous.commits.plan is not None:
            plan = previous.commits.plan
            self._tell_all(messages.AttemptEnded(plan, False, "a new generation begins"))
            if not previous.commits.is_committing:
                self._deletion.submit(self._remove, CheckpointRef(plan.step, previous.id, plan.id))
        self._nodes = nodes
        self._generation = generation
        self._restarting_since_s = self._last_step_seen_s
        self._tuner.begin_generation(generation.world_size)
        self._events.record(
            "generation",
            str(generation.id),
            world_size=generation.world_size,
            is_restart=previous is not None,
        )
        done.set_result(None)

    def _adopt(self, delivery: messages.Delivery) -> None:
        """Take up a generation that an agent speaks of: this coordinator has restarted."""
        if self._generation is not None:
            self._nodes.add(delivery.node)
            return
        here = [message for message in delivery.messages if isinstance(message, messages.RankHere)]
        if not here:
            return
        try:
            records = self._run_store.records()
            mine = next((record for record in records if record.generation == delivery.generation), None)
            self._has_begun = True
            resume = self._run_store.claim_facts(delivery.generation).get("resume", "auto")
            candidates, tip = self._find_candidates("auto" if mine else resume)
        except StorageError as error:
            logger.warning("the coordinator restarted and cannot read the store yet: %s", error)
            return
        world_size = here[0].world_size
        if mine is not None:
            # Every rank had verified it before the record was written; some may be training already.
            vote = voting.RestoreVote.decided(mine.parent, world_size=world_size)
        else:
            vote = voting.RestoreVote(
                world_size=world_size, candidates=candidates, is_exact=isinstance(resume, int)
            )
        generation = _Generation(delivery.generation, world_size, tip, vote)
        self._nodes = {delivery.node}
        if mine is not None:
            generation.parent = mine.parent
            generation.commits = self._make_protocol(generation)
        self._generation = generation
        self._tuner.begin_generation(generation.world_size)
        logger.warning("the coordinator has restarted and goes on with generation %s", generation.id)

    def _make_protocol(self, generation: _Generation) -> protocol.CommitProtocol:
        tolerated = self._settings.on_failure
        return protocol.CommitProtocol(
            world_size=generation.world_size,
            interval_steps=self._settings.interval_steps,
            tolerated_failures=None if tolerated == "warn" else tolerated,
            latency_s=_LATENCY_S,
            start_step=generation.parent.step if generation.parent else 0,
        )

    # The one thread that decides.

    def _run(self) -> None:
        while True:
            try:
                job = self._inbox.get(timeout=_TICK_S)
            except queue.Empty:
                job = self._tick
            if job is None:
                return
            try:
                job()
            except Exception:
                # A fault of ours must not end the run: training goes on, and the next event is tried.
                logger.exception("the coordinator failed on an event and goes on")
            with self._changed:
                self._changed.notify_all()

    def _tick(self) -> None:
        self._feed(protocol.Tick())

    def _take(self, delivery: messages.Delivery) -> None:
        generation = self._generation
        if generation is None or delivery.generation != generation.id:
            return
        for message in delivery.messages:
            self._take_one(generation, message)

    def _take_one(self, generation: _Generation, message: messages.Message) -> None:
        match message:
            case messages.RankHere():
                self._rank_here(generation, message)
            case messages.RestoreAsked(rank):
                self._carry_out_vote(generation, generation.vote.ask(rank))
            case messages.RestoreReported(rank, ref, error, is_mismatch):
                self._carry_out_vote(
                    generation, generation.vote.report(rank, ref, error, is_mismatch=is_mismatch)
                )
            case messages.StepsMeasured():
                if message.rank == 0:
                    self._observe_steps(message)
                self._feed(protocol.Progress(message.step, self._tuner.step_s))
            case messages.TableChanged(rank, rows):
                generation.tables[rank] = tuple(Entry.from_row(row) for row in rows)
            case messages.MetricsTaken(rank, plan_id, metrics, accounts):
                generation.metrics[rank] = metrics
                if rank == 0:
                    generation.accounts = plan_id, accounts
            case protocol.Joined(rank) if generation.commits is None:
                generation.joined_early.add(rank)
            case _:
                self._feed(message)

    def _observe_steps(self, message: messages.StepsMeasured) -> None:
        if message.records:
            if self._restarting_since_s is not None:
                self._tuner.observe_restart(self._clock() - self._restarting_since_s)
                self._restarting_since_s = None
            self._last_step_seen_s = self._clock()
        self._tuner.observe_steps(message.records)
        self._record_interval()
        if self._tuner.refusal is not None:
            self._tell_all(messages.HaltTraining(self._tuner.refusal, False))

    def _record_interval(self) -> None:
        for reason in self._tuner.take_changes():
            self._events.record("interval", self._generation_text(), change=reason, **self._tuner.status())

    def _rank_here(self, generation: _Generation, here: messages.RankHere) -> None:
        commits = generation.commits
        if commits is None:
            return
        plan = commits.plan
        if plan is None:
            commits.skip_plans_to(here.highest_plan_id)
        elif here.uploading_plan_id != plan.id and here.step >= plan.step:
            # It had, or should have had, a snapshot, and nobody holds it any more.
            self._feed(protocol.Failed(here.rank, plan.id, "the agent of its node has restarted"))
        elif here.highest_plan_id < plan.id:
            # The order went to an agent that is gone.
            self._tell_all(messages.PublishPlan(plan))

    def _feed(self, event: protocol.Event) -> None:
        generation = self._generation
        if generation is None or generation.commits is None:
            return
        generation.commits.interval_s = self._tuner.interval_s
        try:
            actions = generation.commits.handle(event, self._clock())
        except protocol.ProtocolError as error:
            logger.warning("an event that cannot be true was left out: %s", error)
            return
        for action in actions:
            try:
                self._carry_out(generation, action)
            except Exception:
                # One that fails must not take those after it along: agents and workers wait for them.
                logger.exception("the coordinator failed on %s and goes on", type(action).__name__)

    # Restoring.

    def _carry_out_vote(self, generation: _Generation, actions: list[voting.Action]) -> None:
        for action in actions:
            match action:
                case voting.Offer(ranks, ref):
                    self._tell_all(messages.OfferRestore(ranks, ref))
                case voting.Reject(ref, reason):
                    logger.warning("step %d cannot be restored, an older one is tried: %s", ref.step, reason)
                    self._forget(ref)
                    self._events.record("rejected", str(generation.id), step=ref.step, reason=reason)
                case voting.Refuse(message, is_mismatch):
                    self._tell_all(messages.RefuseRestore(message, is_mismatch))
                case voting.Proceed(ref):
                    self._storage.submit(self._write_record, generation, ref)

    def _write_record(self, generation: _Generation, ref: CheckpointRef | None) -> None:
        if generation.commits is None:
            record = lineage.record_for(
                generation.id, world_size=generation.world_size, parent=ref, tip_record=generation.tip
            )
            try:
                self._run_store.write_record(record)
            except StorageError as error:
                self._tell_all(
                    messages.RefuseRestore(f"the generation's record cannot be written: {error}", False)
                )
                return
        accounts = self._parent_accounts(ref)
        self._inbox.put(lambda: self._open(generation, ref, accounts))

    def _parent_accounts(self, ref: CheckpointRef | None) -> dict[str, Any]:
        """Return what the restored checkpoint says of the data, for the telemetry, which outlives it."""
        if ref is None or not self._settings.telemetry:
            return {}
        try:
            return self._run_store.read_manifest(ref).accounts
        except (CheckpointError, StorageError) as error:
            logger.info("the accounts of step %d cannot be read again: %s", ref.step, error)
            return {}

    def _open(self, generation: _Generation, ref: CheckpointRef | None, accounts: dict[str, Any]) -> None:
        if generation.commits is None:
            generation.parent = ref
            generation.commits = self._make_protocol(generation)
            if ref is None:
                # A fresh start left the old checkpoints behind: they are not this lineage's to rotate.
                self._committed = []
            else:
                self._committed = [kept for kept in self._committed if kept <= ref]
            for rank in sorted(generation.joined_early):
                self._feed(protocol.Joined(rank))
            self._events.record(
                "restored",
                str(generation.id),
                step=ref.step if ref else 0,
                parent=[ref.step, str(ref.generation), ref.plan_id] if ref else None,
                parent_accounts=accounts,
            )
            # The parent's manifest will be rotated away: what it says of the data must not be lost with us.
            self._deletion.submit(self._events.flush)
        self._tell_all(messages.ProceedRestore(ref))

    # Saving.

    def _carry_out(self, generation: _Generation, action: protocol.Action) -> None:
        match action:
            case protocol.Publish(plan):
                self._tell_all(messages.PublishPlan(plan))
            case protocol.WriteCommit(plan, shards):
                manifest = Manifest(
                    ref=CheckpointRef(plan.step, generation.id, plan.id),
                    world_size=generation.world_size,
                    layout_digest="",
                    shards=shards,
                    created_unix_s=time.time(),
                    write_id=secrets.token_hex(8),
                    metrics=generation.metrics.get(0, {}),
                    accounts=_accounts_of(generation, plan.id),
                )
                self._created_unix_s[manifest.ref] = manifest.created_unix_s
                self._storage.submit(self._commit, generation, manifest, dict(generation.tables))
            case protocol.EndAttempt():
                self._attempt_ended(generation, action)
            case protocol.AcceptSave(step):
                self._tell_all(messages.AcceptSave(step))
            case protocol.KeepPerRank():
                self._tell_all(messages.KeepPerRank())
            case protocol.Finish(detail):
                if detail:
                    logger.warning("no last checkpoint: %s", detail)
                self._storage.submit(self._write_end, generation)
                self._tell_all(messages.FinishTraining(detail))
            case protocol.Halt(reason, is_fenced):
                logger.error("training stops: %s", reason)
                self._tell_all(messages.HaltTraining(reason, is_fenced))

    def _commit(
        self, generation: _Generation, manifest: Manifest, tables: dict[int, tuple[Entry, ...]]
    ) -> None:
        """Write layout and manifest, then look whether this generation was still the newest."""
        plan_id = manifest.ref.plan_id
        try:
            entries = tuple(entry for rank in range(generation.world_size) for entry in tables[rank])
            if self._last_layout is None or self._last_layout[0] != entries:
                problem = layout.uncovered(entries)
                if problem is not None:
                    raise StateError(f"step {manifest.ref.step} cannot be put together again: {problem}")
                self._last_layout = entries, self._run_store.write_layout(entries)
            self._run_store.write_manifest(dataclasses.replace(manifest, layout_digest=self._last_layout[1]))
            newer = lineage.newer_claim(generation.id, self._run_store.claims())
            if newer is not None:
                raise FencedError(
                    f"generation {generation.id} is cut off: {newer} of the same run has started since",
                    generation=generation.id,
                    newer=newer,
                )
        except FencedError as error:
            ended = protocol.CommitEnded(plan_id, str(error), is_fenced=True)
        except Exception as error:  # noqa: BLE001  whatever it was, the attempt must come to its end
            ended = protocol.CommitEnded(plan_id, str(error))
        else:
            ended = protocol.CommitEnded(plan_id)
        self._inbox.put(lambda: self._feed(ended) if self._generation is generation else None)

    def _write_end(self, generation: _Generation) -> None:
        try:
            self._run_store.write_end(generation.id, {"failure_rate": self._tuner.failure_rate.to_dict()})
        except StorageError as error:
            logger.warning(
                "the end of %s could not be noted: the next start counts it as failed: %s",
                generation.id,
                error,
            )

    def _attempt_ended(self, generation: _Generation, end: protocol.EndAttempt) -> None:
        self._tell_all(messages.AttemptEnded(end.plan, end.is_committed, end.detail))
        facts = {
            "step": end.plan.step,
            "plan_id": end.plan.id,
            "stall_s": end.stall_s,
            "persist_s": end.persist_s,
        }
        if not end.is_committed:
            quiet = end.reason in ("superseded", "closing")
            logger.log(
                logging.DEBUG if quiet else logging.WARNING,
                "no checkpoint at step %d (%s): %s",
                end.plan.step,
                end.reason,
                end.detail,
            )
            self._events.record(
                "attempt_failed", str(generation.id), reason=end.reason, detail=end.detail, **facts
            )
            if end.num_bytes and not end.has_commit_begun:
                self._deletion.submit(self._remove, CheckpointRef(end.plan.step, generation.id, end.plan.id))
            return
        self._tuner.observe_checkpoint(
            stall_s=end.stall_s, persist_s=end.persist_s, bytes_per_rank=end.bytes_per_rank
        )
        self._record_interval()
        logger.info(
            "checkpoint of step %d: stall %.1f ms, persist %.2f s, %.1f MB, interval %s, overhead %.2f %%",
            end.plan.step,
            end.stall_s * 1e3,
            end.persist_s,
            end.num_bytes / 1e6,
            self._tuner.interval_text(),
            100 * self._tuner.overhead,
        )
        self._events.record(
            "checkpoint",
            str(generation.id),
            num_bytes=end.num_bytes,
            accounts=_accounts_of(generation, end.plan.id),
            **facts,
            **self._tuner.status(),
        )
        self._deletion.submit(self._events.flush_if_older_than, _TELEMETRY_EVERY_S)
        self._committed.append(CheckpointRef(end.plan.step, generation.id, end.plan.id))
        old = to_delete(
            self._committed,
            keep_last=self._settings.keep_last,
            keep_every_steps=self._settings.keep_every_steps,
            keep_every_s=self._settings.keep_every_s,
            created_unix_s=self._created_unix_s,
        )
        self._deletion.submit(self._rotate, generation.id, old)

    def _sweep(self, generation_id: GenerationId) -> None:
        """Remove what earlier generations left behind, once it is old enough to be nobody's."""
        try:
            swept = self._run_store.sweep(
                generation_id, older_than_s=_SWEEP_OLDER_THAN_S, now_unix_s=time.time()
            )
        except StorageError as error:
            logger.warning(
                "remains of earlier starts could not be removed, the next start tries again: %s", error
            )
            return
        if swept:
            self._events.record("swept", str(generation_id), keys=len(swept))

    def _remove(self, ref: CheckpointRef) -> None:
        """Delete what is durable of an attempt that nobody will commit."""
        try:
            self._run_store.delete(ref)
        except StorageError as error:
            logger.warning(
                "what is left of step %d could not be deleted, a later start will: %s", ref.step, error
            )

    def _rotate(self, generation_id: GenerationId, refs: list[CheckpointRef]) -> None:
        for ref in refs:
            try:
                # A newer generation may go back to any checkpoint that it finds: from its claim on they are its own.
                if lineage.newer_claim(generation_id, self._run_store.claims()) is not None:
                    return
                self._run_store.delete(ref)
            except StorageError as error:
                # Tried again after the next checkpoint; saving does not depend on it.
                logger.warning("the old checkpoint of step %d could not be deleted: %s", ref.step, error)
                return
            self._inbox.put(functools.partial(self._forget, ref))

    def _forget(self, ref: CheckpointRef) -> None:
        self._committed = [kept for kept in self._committed if kept != ref]
        self._created_unix_s.pop(ref, None)

    def _tell_all(self, order: messages.Order) -> None:
        for node in sorted(self._nodes):
            self._send(node, order)

    def _generation_text(self) -> str:
        return str(self._generation.id) if self._generation else ""


def _accounts_of(generation: _Generation, plan_id: int) -> dict[str, Any]:
    return generation.accounts[1] if generation.accounts[0] == plan_id else {}
