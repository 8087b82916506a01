"""The node agent: does for the workers of one node what must not cost training time.

It holds the descriptors of their segments, streams arenas to storage, reads
checkpoints into them, and relays messages in both directions. It outlives the
workers, so a snapshot that was complete when one died is still uploaded. No
torch and no Ray in here; `runtime.actors` puts it into a Ray actor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raycheck.core import protocol
from raycheck.core.lineage import GenerationId
from raycheck.core.notice import Notice
from raycheck.core.page import Plan
from raycheck.runtime import messages, wire
from raycheck.runtime.connected import MAX_SLOTS, ConnectedWorker, Left, LeftSegments, parse_ref
from raycheck.runtime.fetching import Fetching
from raycheck.runtime.storing import Storing, uploads_seen
from raycheck.store.run import RunStore

logger = logging.getLogger("raycheck")

_PULSE_S = 0.1
_IDLE_PULSE_S = 1.0
_UPLOADS_EVERY_S = 1.0
_ACCEPT_AGAIN_S = 1.0
_KEEP_LEFT_S = 600.0
"""How long the memory of a worker that is gone waits for its successor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How an agent may use the network."""

    parallel_parts: int = 4
    bytes_per_s: float | None = None
    niceness: int = 0
    """Of the agent's process, added to what it has."""


class Agent:
    """Serves the workers of one node until closed.

    Args:
        node: This node's id.
        address: Where workers connect, in the abstract namespace.
        run_store: The run's store; used from several threads.
        deliver: Hands a batch to the coordinator. Blocks; raises if it did
            not arrive, and is then called again.
        limits: For uploads.

    Raises:
        OSError: If another agent listens at the address.
    """

    def __init__(
        self,
        *,
        node: str,
        address: str,
        run_store: RunStore,
        deliver: Callable[[messages.Delivery], None],
        limits: Limits | None = None,
    ) -> None:
        self._node = node
        self._deliver = deliver
        limits = limits or Limits()
        self._lock = threading.RLock()
        self._workers: dict[int, ConnectedWorker] = {}
        self._left = LeftSegments(keep_s=_KEEP_LEFT_S)
        self._handed_out: dict[int, Left] = {}
        """Segments given to workers that have not said hello yet, by rank; their descriptors are not ours any more."""

        self._uploads_told_s = 0.0
        self._step_told = -1, 0.0
        """The newest step that the coordinator was told of, and when (monotonic seconds)."""

        self._outbox: queue.Queue[tuple[GenerationId, messages.Message]] = queue.Queue()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="raycheck-agent")
        self._fetching = Fetching(
            run_store=run_store.patient(),
            lock=self._lock,
            pool=self._pool,
            tell=self._tell,
            parallel=limits.parallel_parts,
            closed=self._closed,
        )
        self._storing = Storing(
            run_store=run_store,
            lock=self._lock,
            pool=self._pool,
            tell=self._tell,
            parallel_parts=limits.parallel_parts,
            bytes_per_s=limits.bytes_per_s,
        )
        self._listener = wire.listen(address)
        self._threads = [
            threading.Thread(target=target, name=f"raycheck-{target.__name__.strip('_')}", daemon=True)
            for target in (self._accept, self._pulse, self._send)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop uploads and let go of all workers. What was not committed is left to the next start."""
        self._closed.set()
        with contextlib.suppress(OSError):
            # Closing alone does not wake a thread that waits there, and keeps the address taken.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            for job in worker.uploads.values():
                job.cancelled.set()
            worker.connection.close()
        self._left.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def introduce(self) -> None:
        """Tell the coordinator about every rank here again: it has restarted."""
        with self._lock:
            for worker in self._workers.values():
                if worker.is_connected:
                    self._introduce(worker)

    def obey(self, order: messages.Order) -> None:
        """Carry out an order of the coordinator. Returns at once; slow parts run in threads."""
        # Under the lock, since a page that was let go cannot be written.
        with self._lock:
            workers = list(self._workers.values())
            match order:
                case messages.PublishPlan(plan, is_held, spared):
                    for worker in workers:
                        if plan.id < worker.page.plan.id:
                            # Of a coordinator that is gone: ids only rise.
                            continue
                        if is_held:
                            worker.page.hold_step = plan.step
                        worker.page.spare(plan.id, spared)
                        worker.page.plan = plan
                case messages.AttemptEnded():
                    for worker in workers:
                        self._storing.end(worker, order)
                        self._release(worker)
                        detail = {"is_committed": order.is_committed, "detail": order.detail}
                        worker.send("ended", plan=list(order.plan), **detail)
                case messages.OfferRestore(ranks, ref):
                    for worker in workers:
                        if worker.rank in ranks:
                            self._fetching.take_offer(worker, ref)
                case messages.ProceedRestore(ref):
                    self._fetching.forget_offers()
                    self._left.clear()
                    for worker in workers:
                        worker.decided = (ref,)
                        self._fetching.proceed_if_verified(worker)
                case messages.RefuseRestore(message, is_mismatch):
                    for worker in workers:
                        worker.send("refuse", message=message, is_mismatch=is_mismatch)
                case messages.AcceptSave(step):
                    for worker in workers:
                        worker.send("accept", step=step)
                case messages.KeepPerRank():
                    for worker in workers:
                        worker.send("keep_per_rank")
                case messages.FinishTraining(detail):
                    for worker in workers:
                        worker.send("finish", detail=detail)
                case messages.ReleaseTraining():
                    for worker in workers:
                        worker.page.hold_step = 0
                case messages.HaltTraining(reason, is_fenced):
                    for worker in workers:
                        worker.send("halt", reason=reason, is_fenced=is_fenced)
                        worker.page.must_halt = True

    def hear(self, notice: Notice) -> None:
        """Pass on what is announced for this node, in the name of one of its workers. Returns at once."""
        with self._lock:
            worker = next((worker for worker in self._workers.values() if worker.is_connected), None)
        if worker is not None:
            self._tell(worker, messages.NoticeHeard(dataclasses.replace(notice, node=self._node)))

    def status(self) -> dict[str, Any]:
        """Return what is in flight here, as plain values."""
        with self._lock:
            workers = list(self._workers.values())
        return {
            "node": self._node,
            "uploads": [
                {
                    "rank": w.rank,
                    "step": job.plan.step,
                    "bytes": job.num_bytes_done,
                    "total_bytes": job.num_bytes,
                }
                for w in workers
                for job in w.uploads.copy().values()
            ],
        }

    # Workers.

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._admit(self._listener.accept()[0])
            except (OSError, RuntimeError) as error:
                # As without a descriptor or a thread to spare. A worker knocks until it is let in.
                if not self._closed.wait(_ACCEPT_AGAIN_S):
                    logger.warning("node %s: a worker could not be let in, yet: %s", self._node, error)

    def _admit(self, sock: socket.socket) -> None:
        connection = wire.Connection(sock)
        try:
            # The abstract namespace has no permissions of its own.
            if connection.peer_uid() == os.getuid():
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                return
        except BaseException:
            connection.close()
            raise
        connection.close()

    def _serve(self, connection: wire.Connection) -> None:
        worker = None
        try:
            hello, fd = connection.receive()
            if hello["op"] == "adopt":
                self._hand_out(connection, wire.check_fields(hello))
                return
            if fd is None:
                raise ConnectionError("a hello without a descriptor")
            worker = self._register(connection, fd, hello)
            while True:
                message, further_fd = connection.receive()
                if further_fd is not None and not self._take_arena(worker, message, further_fd):
                    os.close(further_fd)
                self._take(worker, wire.check_fields(message))
        except (OSError, ValueError, LookupError) as error:
            if not isinstance(error, ConnectionError) and not self._closed.is_set():
                logger.exception("node %s: a worker sent something that cannot be read", self._node)
        finally:
            connection.close()
            if worker is not None:
                self._lose(worker)

    def _hand_out(self, connection: wire.Connection, message: dict[str, Any]) -> None:
        """Give a starting worker the segment of one that is gone, or hang up."""
        left = self._left.take(rank=message["rank"], world_size=message["world_size"])
        if left is None:
            return
        try:
            connection.send("segment", fd=left.fd)
            with self._lock:
                self._handed_out[message["rank"]] = left
        finally:
            os.close(left.fd)

    def _register(self, connection: wire.Connection, fd: int, hello: dict[str, Any]) -> ConnectedWorker:
        try:
            if hello["op"] != "hello":
                raise ValueError(f"{hello['op'][:100]!r} in the place of a hello")
            worker = ConnectedWorker(connection, fd, wire.check_fields(hello))
        except (OSError, ValueError):
            os.close(fd)
            raise
        with self._lock:
            former = self._workers.get(worker.rank)
            left = self._handed_out.pop(worker.rank, None)
            if left is not None and not worker.has_joined:
                worker.adopted = left.ref, left.rank
            # One of a group that is over does not take the place of its successor.
            if former is None or worker.generation >= former.generation:
                self._workers[worker.rank] = worker
                if former is not None:
                    self._succeed(former, worker)
        self._introduce(worker)
        return worker

    def _take_arena(self, worker: ConnectedWorker, message: dict[str, Any], fd: int) -> bool:
        """Take a further segment in; return whether it is one, and the descriptor is ours from now on."""
        with self._lock:
            is_taken = message["op"] == "arena" and not worker.is_let_go and len(worker.fds) < MAX_SLOTS
            if is_taken:
                worker.fds.append(fd)
            return is_taken

    def _succeed(self, former: ConnectedWorker, worker: ConnectedWorker) -> None:
        """Let go of a rank's former connection, which no order reaches any more."""
        if worker.generation == former.generation:
            # The same process over a new connection: what it has staged goes on.
            worker.uploads, former.uploads = former.uploads, {}
        else:
            # A new group starts only once the attempts of the last one are committed or given up.
            self._storing.give_up(former)
        self._release(former)

    def _introduce(self, worker: ConnectedWorker) -> None:
        here = messages.RankHere(
            worker.rank,
            worker.world_size,
            step=worker.page.step,
            highest_plan_id=worker.page.plan.id,
            uploading_plan_ids=tuple(worker.uploads),
        )
        self._tell(worker, here)
        if worker.table is not None:
            self._tell(worker, worker.table)
        if worker.has_joined:
            # What it cost was told when it happened.
            self._tell(worker, messages.RestoreEnded(worker.rank))
            self._tell(worker, protocol.Joined(worker.rank))
        else:
            self._tell(worker, messages.RestoreAsked(worker.rank))

    def _lose(self, worker: ConnectedWorker) -> None:
        worker.is_connected = False
        self._tell(worker, protocol.Lost(worker.rank))
        with self._lock:
            if self._workers.get(worker.rank) is not worker:
                self._storing.give_up(worker)
        self._release(worker)

    def _release(self, worker: ConnectedWorker) -> None:
        """Give up the descriptors of a worker that is gone, unless a snapshot is still being stored."""
        with self._lock:
            if worker.is_connected or worker.uploads or worker.is_let_go:
                return
            if self._workers.get(worker.rank) is worker:
                del self._workers[worker.rank]
                stored = worker.newest_stored()
                if stored is not None and not worker.has_closed and not self._closed.is_set():
                    slot, ref = stored
                    fd = os.dup(worker.fds[slot])
                    self._left.add(Left(fd, worker.rank, worker.world_size, ref, time.monotonic()))
            worker.let_go()

    def _take(self, worker: ConnectedWorker, message: dict[str, Any]) -> None:
        match message["op"]:
            case "joined":
                worker.has_joined = True
                self._tell(worker, _restore_ended(worker, message))
                self._tell(worker, protocol.Joined(worker.rank))
            case "table":
                rows = tuple(tuple(row) for row in message["rows"])
                worker.table = messages.TableChanged(worker.rank, rows)
                self._tell(worker, worker.table)
            case "copied":
                self._storing.begin(worker, message)
            case "arena":
                pass  # what counts is the descriptor that came with it
            case "staged":
                self._staged(worker, message)
            case "missed":
                self._tell(worker, protocol.Missed(worker.rank, message["plan_id"]))
            case "failed":
                self._tell(worker, protocol.Failed(worker.rank, message["plan_id"], message["reason"]))
            case "ask":
                asked = protocol.SaveAsked(worker.rank, message["step"], message["is_waiting"])
                self._tell(worker, asked)
            case "read":
                self._fetching.read(worker, message)
            case "report":
                ref = parse_ref(message["ref"])
                self._fetching.report(
                    worker,
                    messages.RestoreReported(worker.rank, ref, message["error"], message["is_mismatch"]),
                )
            case "notice":
                left_s = float(message["seconds_left"])
                notice = Notice(message["source"], left_s, message["detail"], self._node)
                self._tell(worker, messages.NoticeHeard(notice))
            case "closed":
                worker.has_closed = True
                self._tell(worker, protocol.Closed(worker.rank, message["step"]))
            case other:
                raise ValueError(f"unknown message {other!r}")

    def _staged(self, worker: ConnectedWorker, message: dict[str, Any]) -> None:
        plan = Plan(*message["plan"])
        self._storing.begin(worker, message)
        accounts = message.get("accounts", {})
        self._tell(worker, messages.MetricsTaken(worker.rank, plan.id, message["metrics"], accounts))
        staged = protocol.Staged(
            worker.rank,
            plan.id,
            message["stall_s"],
            message["replica_digest"],
            plan.step,
            place=message.get("place", ""),
        )
        self._tell(worker, staged)

    # The coordinator.

    def _tell(self, worker: ConnectedWorker, message: messages.Message) -> None:
        self._outbox.put((worker.generation, message))

    def _pulse(self) -> None:
        """Pass on the workers' progress: often while they step, rarely while they do not."""
        while not self._closed.wait(_PULSE_S):
            try:
                self._beat(time.monotonic())
            except Exception:
                logger.exception(
                    "node %s: the workers' progress was not told, and is tried again", self._node
                )

    def _beat(self, now_s: float) -> None:
        if now_s - self._uploads_told_s >= _UPLOADS_EVERY_S:
            self._uploads_told_s = now_s
            self._tell_uploads()
        self._left.drop(now_s=now_s)
        with self._lock:
            connected = [worker for worker in self._workers.values() if worker.is_connected]
            # Also of those that restore: else nothing would tell a coordinator that has restarted of them.
            workers = [worker for worker in connected if worker.has_joined] or connected
            step = max((worker.page.step for worker in workers), default=-1)
            last_step, last_told_s = self._step_told
            if not workers or (step == last_step and now_s - last_told_s < _IDLE_PULSE_S):
                return
            self._step_told = step, now_s
            self._tell_steps(min(workers, key=lambda worker: worker.rank), step)

    def _tell_steps(self, worker: ConnectedWorker, step: int) -> None:
        records = worker.page.records_since(worker.num_records_seen)
        if records:
            worker.num_records_seen = records[-1].number + 1
        told = tuple((r.duration_s, r.stall_s, r.is_overlapped) for r in records)
        self._tell(worker, messages.StepsMeasured(worker.rank, step, told))

    def _tell_uploads(self) -> None:
        with self._lock:
            seen = uploads_seen(self._node, self._workers.values())
        if seen is not None:
            self._tell(*seen)

    def _send(self) -> None:
        while not self._closed.is_set():
            try:
                generation, first = self._outbox.get(timeout=0.5)
            except queue.Empty:
                continue
            batch = [first]
            # One delivery holds messages of one generation only.
            while not self._outbox.empty() and self._outbox.queue[0][0] == generation:
                batch.append(self._outbox.get()[1])
            self._deliver_until_it_arrives(messages.Delivery(self._node, generation, tuple(batch)))

    def _deliver_until_it_arrives(self, delivery: messages.Delivery) -> None:
        pause_s = 0.1
        while not self._closed.is_set():
            try:
                self._deliver(delivery)
            except Exception as error:  # noqa: BLE001  whatever it was, the coordinator must hear of it
                logger.info("node %s: the coordinator is out of reach (%s); trying again", self._node, error)
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, 2.0)
            else:
                return


def _restore_ended(worker: ConnectedWorker, message: dict[str, Any]) -> messages.RestoreEnded:
    facts = {name: message[name] for name in ("seconds", "num_bytes", "num_memory_bytes") if name in message}
    return messages.RestoreEnded(worker.rank, **facts)
