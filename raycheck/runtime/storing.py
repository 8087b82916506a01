"""The agent's part in a save: shards out of arenas into storage, and away again where they were for nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raycheck.core import layout, protocol
from raycheck.core.lineage import CheckpointRef
from raycheck.core.page import PAGE_BYTES, Plan
from raycheck.core.sums import ChunkSums
from raycheck.errors import StorageError
from raycheck.runtime import messages
from raycheck.runtime.connected import ConnectedWorker, Upload
from raycheck.store.run import RunStore
from raycheck.store.transfer import TokenBucket, TransferCancelledError
from raycheck.store.upload import upload

logger = logging.getLogger("raycheck")

_CHUNK_BYTES = 1 << 20
"""What a checksum covers, and so the least that a read fetches: after a resize, ranks read parts of shards."""


class Storing:
    """Stores what workers have in their arenas. Thread-safe.

    Args:
        run_store: The run's store.
        lock: The agent's, which guards its workers.
        pool: Each upload blocks a thread of it.
        tell: Hands a message of a worker to the coordinator.
        parallel_parts: Of each upload.
        bytes_per_s: Of all of them together; None: no limit.
    """

    def __init__(
        self,
        *,
        run_store: RunStore,
        lock: threading.RLock,
        pool: ThreadPoolExecutor,
        tell: Callable[[ConnectedWorker, messages.Message], None],
        parallel_parts: int,
        bytes_per_s: float | None,
    ) -> None:
        self._store = run_store.store
        self._lock = lock
        self._pool = pool
        self._tell = tell
        self._parallel_parts = parallel_parts
        # One bucket for all ranks: the limit is the node's.
        self._bucket = TokenBucket(bytes_per_s) if bytes_per_s else None

    def begin(self, worker: ConnectedWorker, message: dict[str, Any]) -> None:
        """Begin to store what an arena holds, unless this plan's is under way: it is told of twice."""
        plan, slot, num_bytes = Plan(*message["plan"]), message.get("slot", 0), message["num_bytes"]
        with self._lock:
            if plan in worker.ended or plan.id in worker.uploads:
                return
            if not 0 <= slot < len(worker.fds):
                raise ValueError(f"there is no arena {slot}")
            # They belong to attempts whose end was never told.
            forgotten = [job for job in worker.uploads.values() if job.slot == slot]
            for job in forgotten:
                del worker.uploads[job.plan.id]
            ref = CheckpointRef(plan.step, worker.generation, plan.id)
            job = worker.uploads[plan.id] = Upload(plan, ref, num_bytes, slot=slot)
            worker.page.is_in_flight = True
        for old in forgotten:
            old.cancelled.set()
            self._tell(worker, protocol.Failed(worker.rank, old.plan.id, "its memory has another snapshot"))
        self._pool.submit(self._persist, worker, job)

    def end(self, worker: ConnectedWorker, order: messages.AttemptEnded) -> None:
        """Take in how an attempt has ended: what is not committed goes."""
        with self._lock:
            job = worker.uploads.pop(order.plan.id, None)
            worker.page.is_in_flight = bool(worker.uploads)
            worker.ended.append(order.plan)
        if job is not None and not order.is_committed:
            job.cancelled.set()
            if not job.is_durable:
                self._pool.submit(self._delete, job)

    def give_up(self, worker: ConnectedWorker) -> None:
        """End the uploads of a worker that no order reaches; what is durable is left as it is."""
        jobs, worker.uploads = worker.uploads, {}
        for job in jobs.values():
            if not job.is_durable:
                job.cancelled.set()

    def _persist(self, worker: ConnectedWorker, job: Upload) -> None:
        started_s = time.monotonic()
        try:
            sums = self._upload(worker, job)
        except TransferCancelledError:
            self._delete(job)
            return
        except Exception as error:
            # Whatever it was: an attempt of which nobody hears again would hold up the next one for ever.
            if not isinstance(error, StorageError):
                logger.exception("rank %d was not stored", worker.rank)
            self._tell(worker, protocol.Failed(worker.rank, job.plan.id, str(error) or repr(error)))
            return
        with self._lock:
            # Either the end of the attempt came first, or from here on others may count on this shard.
            job.is_durable = not job.cancelled.is_set()
            if job.is_durable:
                worker.stored[job.slot] = job.ref
        if not job.is_durable:
            self._delete(job)
            return
        name = layout.shard_name(worker.rank, worker.world_size)
        shard = layout.ShardInfo(worker.rank, name, job.num_bytes, sums.digest())
        persist_s = time.monotonic() - started_s
        self._tell(worker, protocol.Durable(job.plan.id, shard, persist_s, job.plan.step))

    def _upload(self, worker: ConnectedWorker, job: Upload) -> ChunkSums:
        name = layout.shard_name(worker.rank, worker.world_size)
        prefix = layout.checkpoint_prefix(job.ref)
        with self._lock:
            if worker.is_let_go:
                raise TransferCancelledError(f"rank {worker.rank} is gone", key=prefix, operation="transfer")
            # Of its own: the worker's may be closed before a cancelled upload has noticed.
            fd, mapping = os.dup(worker.fds[job.slot]), worker.mappings[job.slot]
        try:
            job.keys.append(f"{prefix}/{name}")
            sums = upload(
                self._store,
                job.keys[-1],
                fd,
                source_offset=PAGE_BYTES,
                size_bytes=job.num_bytes,
                chunk_bytes=_CHUNK_BYTES,
                parallel_parts=self._parallel_parts,
                bytes_per_s=self._bucket,
                cancelled=job.cancelled,
                on_progress=job.add_progress,
                mapping=mapping,
            )
            job.keys.append(f"{prefix}/{layout.sums_name(name)}")
            self._store.put(job.keys[-1], sums.encode())
        finally:
            os.close(fd)
        return sums

    def _delete(self, job: Upload) -> None:
        """Delete what this attempt has stored and nobody was told of, so that nobody can have committed it."""
        with contextlib.suppress(StorageError):
            self._store.delete(list(job.keys))


def uploads_seen(
    node: str, workers: Iterable[ConnectedWorker]
) -> tuple[ConnectedWorker, messages.UploadsSeen] | None:
    """Return how far the newest attempt's uploads are, for people who look on, and one whose upload it is."""
    busy = [(worker, job) for worker in workers for job in worker.uploads.values()]
    if not busy:
        return None
    first, newest = max(busy, key=lambda each: each[1].ref)
    uploads = [(worker.rank, job) for worker, job in busy if job.ref == newest.ref]
    seen = messages.UploadsSeen(
        node=node,
        plan_id=newest.plan.id,
        ranks=tuple(sorted(rank for rank, _ in uploads)),
        num_bytes_done=sum(min(job.num_bytes_done, job.num_bytes) for _, job in uploads),
        num_bytes=sum(job.num_bytes for _, job in uploads),
        seconds=time.monotonic() - min(job.started_s for _, job in uploads),
    )
    return first, seen
