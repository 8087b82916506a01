"""The coordinator: one per run. Decides when, at which step, and what is committed.

It holds the pure state machines of `core` and feeds them in one thread; that
thread never waits for storage. No Ray in here; `runtime.actors` puts it into
a Ray actor. When it is killed it comes back empty, learns from the agents who
is there and from the store what counts, and goes on; an attempt that was
under way is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raycheck.config import Settings
from raycheck.core import protocol
from raycheck.core import restore as voting
from raycheck.core.failure_rate import FailureKind
from raycheck.core.layout import Entry, Manifest
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.notice import Notice
from raycheck.errors import StorageError
from raycheck.observe.events import EventLog
from raycheck.runtime import messages, starting
from raycheck.runtime.deciding import Decider
from raycheck.runtime.generation import LATENCY_S, Generation
from raycheck.runtime.keeping import Keeping
from raycheck.runtime.preempting import Preempting
from raycheck.runtime.registration import Offer, Registration
from raycheck.runtime.reporting import Measure, Reporter, measure_nothing
from raycheck.runtime.restoring import RestoreRunner
from raycheck.runtime.status import status_of
from raycheck.runtime.tuner import Tuner
from raycheck.runtime.writing import Writer
from raycheck.store.run import RunStore

logger = logging.getLogger("raycheck")

_TICK_S = 0.2

_PROGRESS_EVERY_S = 60.0
"""How often telemetry says how far the training is where no checkpoint does."""

_TELEMETRY_EVERY_S = 10.0
"""How much telemetry a killed coordinator may lose, seconds."""

_STOP_ROOM_S = 30.0
"""How long ranks that stand still wait to be stopped, after the time that their checkpoint has."""

_STAGED_WAIT_S = 30.0
"""How long a new generation waits for the commit of what the one before has fully staged."""


class Coordinator:
    """Runs until closed; every method is thread-safe.

    Args:
        run_store: The run's store.
        settings: As the user chose them.
        send: Hands an order to the agent of a node. Must not block or raise.
        clock: Monotonic seconds.
        measure: Where metrics go.
    """

    def __init__(
        self,
        *,
        run_store: RunStore,
        settings: Settings,
        send: Callable[[str, messages.Order], None],
        clock: Callable[[], float] = time.monotonic,
        measure: Measure = measure_nothing,
    ) -> None:
        self._run_store = run_store
        self._patient_store = run_store.patient()
        self._settings = settings
        self._send = send
        self._clock = clock
        self._nodes: set[str] = set()
        self._generation: Generation | None = None
        self._has_begun = False
        self._last_step_seen_s: float | None = None
        self._last_step = 0
        """The newest step that rank 0 was seen at."""

        self._progress_told_s = clock()
        self._restarting_since_s: float | None = None
        self._tuner = Tuner(settings)
        self._events = EventLog(run_store.store if settings.telemetry else None)
        self._decider = Decider(self._tick, tick_s=_TICK_S, clock=clock)
        self._inbox = self._decider.inbox
        self._thread = self._decider.thread
        self._storage = ThreadPoolExecutor(max_workers=2, thread_name_prefix="raycheck-storage")
        self._writer = Writer(run_store)
        self._reporter = Reporter(self._events, self._tuner, measure)
        self._keeping = Keeping(
            run_store=run_store, settings=settings, events=self._events, decide=self._inbox.put
        )
        self._deletion = self._keeping.thread
        self._preempting = Preempting(
            events=self._events, lead_s=2 * LATENCY_S, ask=self._want_checkpoint, tell_all=self._tell_all
        )
        self._registration = Registration(
            run_store=run_store,
            keeping=self._keeping,
            decide=self._inbox.put,
            on_newest_gone=self._want_checkpoint,
        )
        self._restores = RestoreRunner(
            settings=settings,
            writer=self._writer,
            keeping=self._keeping,
            reporter=self._reporter,
            events=self._events,
            storage=self._storage,
            decide=self._inbox.put,
            tell_all=self._tell_all,
            on_open=self._open,
        )
        self._decider.start()

    def check(self) -> None:
        """Find out before the first step whether this run can work. Blocks for storage.

        Raises:
            ConfigError, StorageError: If the store cannot be used.
            CheckpointNotFoundError: If the step to resume from does not exist.
        """
        self._run_store.store.probe()
        starting.find(self._run_store, self._resume)

    def begin_generation(
        self,
        nodes: set[str],
        world_size: int,
        *,
        has_lost_agents: bool = False,
        failure: FailureKind | None = "worker",
    ) -> GenerationId:
        """Claim a generation for a worker group that is about to start.

        Blocks for storage, half an hour where it does not answer, and up to half
        a minute for the commit of what the generation before has staged completely.

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
            self._tuner.remember(starting.recall_failure_rate(self._patient_store, self._tuner.failure_rate))
        elif (judged := self._preempting.judge(failure, self._last_step_seen_s or started_s)) is not None:
            # Before the claim, which is what the next job remembers.
            self._tuner.observe_failure(judged)
        generation_id = starting.claim(
            self._patient_store,
            world_size=world_size,
            failure_rate=self._tuner.failure_rate,
            resume=self._resume,
        )
        found = starting.find(self._patient_store, self._resume)
        self._keeping.begin(found.usable)
        self._registration.begin()
        vote = voting.RestoreVote(
            world_size=world_size,
            candidates=found.candidates,
            is_exact=isinstance(self._resume, int),
        )
        self._has_begun = True
        generation = Generation(generation_id, world_size, found.tip, vote)
        self._decider.call(lambda: self._enter(generation, nodes))
        self._keeping.sweep(generation_id)
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
        return {
            "store_url": self._run_store.store.url,
            **status_of(self._generation, self._tuner, now_s=self._clock()),
            # What is long is for those who read the telemetry.
            "events": [
                {**event, "facts": {k: v for k, v in event["facts"].items() if "accounts" not in k}}
                for event in self._events.recent()
            ],
        }

    def hear_notice(self, notice: Notice) -> None:
        """Take in that a node of this run, or all of it, will end. Returns at once; may be repeated."""
        self._inbox.put(lambda: self._preempting.hear(notice, self._clock(), self._generation_text()))

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that have workers."""
        return frozenset(self._nodes)

    def save_and_hold(self, seconds: float) -> int | None:
        """Take a checkpoint and have all ranks stand still after it, since they are about to be stopped.

        Blocks until it is committed, ``seconds`` at most. Ranks go on by
        themselves when nothing comes of it, or nobody stops them in time.

        Returns:
            The step, after which no other has been taken; None: there was no checkpoint in time.
        """
        deadline_s = self._clock() + seconds
        self._decider.call(lambda: self._hold(seconds))
        self._decider.wait_while(lambda: self._preempting.held_step is None, deadline_s)
        step = self._preempting.held_step
        if step is None:
            self._decider.call(self._preempting.release)
        return step

    def _hold(self, seconds: float) -> None:
        commits = self._generation.commits if self._generation else None
        # Room for being stopped after the commit.
        self._preempting.hold(seconds + _STOP_ROOM_S, self._clock(), commits.plan if commits else None)

    def hear_registered(self, held: Collection[str], every_s: float | None) -> Offer | None:
        """Take in what Ray Train holds of this run; return what it should be given. See `Registration.hear`."""
        return self._decider.call(lambda: self._registration.hear(held, every_s))

    def offer_last(self, held: Collection[str]) -> Offer | None:
        """Return the newest checkpoint for Ray Train to take, unless it has it. Call it once, before `close`.

        Blocks for storage, and up to half a minute for the commit of what is
        staged completely.
        """
        self._await_staged()
        return self._decider.call(lambda: self._registration.offer_last(held)).result()

    def close(self) -> None:
        """Write what is left to write and stop. Blocks for storage."""
        self._decider.close()
        self._storage.shutdown()
        self._deletion.shutdown()
        self._events.record("closed", self._generation_text(), **self._tuner.status())
        self._events.flush()

    # Starting.

    @property
    def _resume(self) -> int | str:
        # Only the first start of a run goes where the user says; after a failure it goes on from its own.
        return "auto" if self._has_begun else self._settings.resume

    def _await_staged(self) -> None:
        self._decider.wait_while(self._is_fully_staged, self._clock() + _STAGED_WAIT_S)

    def _is_fully_staged(self) -> bool:
        commits = self._generation.commits if self._generation else None
        return commits is not None and commits.is_fully_staged

    def _enter(self, generation: Generation, nodes: set[str]) -> None:
        previous = self._generation
        if previous is not None and previous.commits is not None:
            for plan in previous.commits.plans:
                self._tell_all(messages.AttemptEnded(plan, False, "a new generation begins"))
                if not previous.commits.is_committing(plan):
                    self._keeping.remove(CheckpointRef(plan.step, previous.id, plan.id))
        self._preempting.begin()
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

    def _adopt(self, delivery: messages.Delivery) -> None:
        """Take up a generation that an agent speaks of: this coordinator has restarted."""
        if self._generation is not None:
            self._nodes.add(delivery.node)
            return
        try:
            taken_up = starting.take_up(self._run_store, delivery, self._settings)
            if taken_up is None:
                return
            self._registration.begin()
            rate = starting.claimed_failure_rate(
                self._run_store, delivery.generation, self._tuner.failure_rate
            )
        except StorageError as error:
            logger.warning("the coordinator restarted and cannot read the store yet: %s", error)
            return
        generation, found = taken_up
        self._tuner.remember(rate)
        self._has_begun = True
        self._keeping.begin(found.usable)
        self._nodes = {delivery.node}
        self._generation = generation
        self._tuner.begin_generation(generation.world_size)
        logger.warning("the coordinator has restarted and goes on with generation %s", generation.id)

    # The one thread that decides.

    def _tick(self) -> None:
        generation = self._generation
        if generation is not None and generation.commits is not None:
            self._preempting.tick(
                self._clock(),
                persist_s=self._tuner.persist_tail_s or 0.0,
                step_s=self._tuner.step_s or 0.0,
            )
        self._feed(protocol.Tick())

    def _take(self, delivery: messages.Delivery) -> None:
        generation = self._generation
        if generation is None or delivery.generation != generation.id:
            return
        for message in delivery.messages:
            if isinstance(message, messages.RankHere):
                generation.node_of[message.rank] = delivery.node
            self._take_one(generation, message)

    def _take_one(self, generation: Generation, message: messages.Message) -> None:
        match message:
            case messages.RankHere():
                self._rank_here(generation, message)
            case messages.RestoreAsked(rank):
                self._restores.carry_out(generation, generation.vote.ask(rank))
            case messages.RestoreReported(rank, ref, error, is_mismatch):
                self._restores.carry_out(
                    generation, generation.vote.report(rank, ref, error, is_mismatch=is_mismatch)
                )
            case messages.RestoreEnded():
                self._restores.note(generation, message)
            case messages.UploadsSeen():
                generation.uploads[message.node] = message
            case messages.StepsMeasured():
                generation.see_step(message.step, self._clock())
                if message.rank == 0:
                    self._observe_steps(message)
                self._feed(protocol.Progress(message.step, self._tuner.step_s))
            case messages.TableChanged(rank, rows):
                generation.tables[rank] = tuple(Entry.from_row(row) for row in rows)
            case messages.MetricsTaken():
                generation.take(message)
            case messages.NoticeHeard(notice):
                self._preempting.hear(notice, self._clock(), str(generation.id))
            case protocol.Joined(rank) if generation.commits is None:
                generation.joined_early.add(rank)
            case _:
                self._feed(message)

    def _observe_steps(self, message: messages.StepsMeasured) -> None:
        if message.records:
            now_s = self._clock()
            if self._restarting_since_s is not None:
                restart_s = now_s - self._restarting_since_s
                self._restarting_since_s = None
                self._tuner.observe_restart(restart_s)
                self._reporter.resumed(
                    self._generation_text(), step=message.step, last_step=self._last_step, restart_s=restart_s
                )
            self._last_step_seen_s, self._last_step = now_s, message.step
            if now_s - self._progress_told_s >= _PROGRESS_EVERY_S:
                self._progress_told_s = now_s
                self._reporter.progress(self._generation_text(), message.step)
                self._deletion.submit(self._events.flush_if_older_than, _TELEMETRY_EVERY_S)
        self._tuner.observe_steps(message.records)
        self._reporter.intervals(self._generation_text())
        if self._tuner.refusal is not None:
            self._tell_all(messages.HaltTraining(self._tuner.refusal, False))

    def _rank_here(self, generation: Generation, here: messages.RankHere) -> None:
        commits = generation.commits
        if commits is None:
            return
        if not commits.plans:
            commits.skip_plans_to(here.highest_plan_id)
        for plan in commits.plans:
            if plan.id not in here.uploading_plan_ids and here.step >= plan.step:
                # It had, or should have had, a snapshot, and nobody holds it any more.
                self._feed(protocol.Failed(here.rank, plan.id, "the agent of its node has restarted"))
            elif here.highest_plan_id < plan.id:
                # The order went to an agent that is gone.
                self._tell_all(self._preempting.order_for(plan))

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

    def _open(self, generation: Generation) -> None:
        for rank in sorted(generation.joined_early):
            self._feed(protocol.Joined(rank))

    # Saving.

    def _carry_out(self, generation: Generation, action: protocol.Action) -> None:
        match action:
            case protocol.Publish(plan):
                generation.planned_s = self._clock()
                self._preempting.publish(
                    plan, self._clock(), node_of=generation.node_of, world_size=generation.world_size
                )
            case protocol.WriteCommit(plan, shards):
                manifest = generation.manifest_of(plan, shards, created_unix_s=time.time())
                self._keeping.note_time(manifest.ref, manifest.created_unix_s)
                self._storage.submit(self._commit, generation, manifest, generation.tables_of(plan.id))
            case protocol.EndAttempt():
                self._attempt_ended(generation, action)
            case protocol.AcceptSave(step):
                self._tell_all(messages.AcceptSave(step))
            case protocol.KeepPerRank():
                self._tell_all(messages.KeepPerRank())
            case protocol.Finish(detail):
                if detail:
                    logger.warning("no last checkpoint: %s", detail)
                self._storage.submit(self._writer.end, generation.id, self._tuner.failure_rate)
                self._tell_all(messages.FinishTraining(detail))
            case protocol.Halt(reason, is_fenced):
                logger.error("training stops: %s", reason)
                self._tell_all(messages.HaltTraining(reason, is_fenced))

    def _commit(
        self, generation: Generation, manifest: Manifest, tables: dict[int, tuple[Entry, ...]]
    ) -> None:
        ended = self._writer.commit(generation, manifest, tables)
        self._inbox.put(lambda: self._feed(ended) if self._generation is generation else None)

    def _attempt_ended(self, generation: Generation, end: protocol.EndAttempt) -> None:
        self._tell_all(messages.AttemptEnded(end.plan, end.is_committed, end.detail))
        self._preempting.ended(
            end.plan,
            is_committed=end.is_committed,
            has_failed=end.reason == "failed",
            is_replaced=end.reason == "superseded",
        )
        ref = CheckpointRef(end.plan.step, generation.id, end.plan.id)
        if not end.is_committed:
            generation.forget(end.plan.id)
            self._reporter.failed(generation, end)
            if end.num_bytes and not end.has_commit_begun:
                self._keeping.remove(ref)
            return
        generation.committed_s = self._clock()
        self._tuner.observe_checkpoint(
            stall_s=end.stall_s, persist_s=end.persist_s, bytes_per_rank=end.bytes_per_rank
        )
        self._reporter.intervals(str(generation.id))
        self._reporter.committed(generation, end)
        generation.forget(end.plan.id)
        self._deletion.submit(self._events.flush_if_older_than, _TELEMETRY_EVERY_S)
        self._keeping.add(ref)
        self._registration.consider()
        self._keeping.rotate(generation.id)

    def _want_checkpoint(self) -> None:
        # Not at once: what has just been decided must be carried out first.
        self._inbox.put(lambda: self._feed(protocol.SaveAsked(0, 0)))

    def _tell_all(self, order: messages.Order) -> None:
        for node in sorted(self._nodes):
            self._send(node, order)

    def _generation_text(self) -> str:
        return str(self._generation.id) if self._generation else ""
