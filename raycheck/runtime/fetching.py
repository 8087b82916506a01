"""The agent's part in a restore: offers, and the bytes that workers ask for.

A rank's own shard may still be in memory, where a former worker of this node
left its segment; the rest comes from storage, a part of which is read once per
node.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raycheck.core import layout
from raycheck.core.lineage import CheckpointRef
from raycheck.core.page import PAGE_BYTES
from raycheck.core.plan import Read
from raycheck.errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from raycheck.runtime import messages
from raycheck.runtime.connected import ConnectedWorker, parse_ref, ref_fields
from raycheck.runtime.progress import Progress
from raycheck.store.download import download, find_missing
from raycheck.store.run import RunStore
from raycheck.store.spans import Read as SourceRead
from raycheck.store.transfer import TransferCancelledError

logger = logging.getLogger("raycheck")


class Fetching:
    """Passes offers to workers and reads what they want of them. Thread-safe.

    Args:
        run_store: The run's store.
        lock: The agent's, which guards its workers.
        pool: For what must not hold up orders.
        tell: Hands a message of a worker to the coordinator.
        parallel: Requests at a time for each worker.
        closed: Set when the agent closes.
    """

    def __init__(
        self,
        *,
        run_store: RunStore,
        lock: threading.RLock,
        pool: ThreadPoolExecutor,
        tell: Callable[[ConnectedWorker, messages.Message], None],
        parallel: int,
        closed: threading.Event,
    ) -> None:
        self._run_store = run_store
        self._lock = lock
        self._pool = pool
        self._tell = tell
        self._parallel = parallel
        self._closed = closed
        self._offers_lock = threading.Lock()
        self._offers: dict[CheckpointRef, tuple[layout.Manifest, list[Any]]] = {}

    def forget_offers(self) -> None:
        """Let go of what was read of checkpoints, once all ranks load."""
        self._offers.clear()

    def take_offer(self, worker: ConnectedWorker, ref: CheckpointRef | None) -> None:
        """Pass an offer on, unless it is the one that the worker has already."""
        if worker.offered == (ref,):
            # Repeated, since the coordinator has restarted: the bytes are not read twice.
            if worker.reported is not None:
                self._tell(worker, worker.reported)
            return
        worker.offered, worker.reported = (ref,), None
        self._pool.submit(self._offer, worker, ref)

    def _offer(self, worker: ConnectedWorker, ref: CheckpointRef | None) -> None:
        fields: dict[str, Any] = {}
        try:
            if ref is not None:
                manifest, rows = self._fetch_offer(ref)
                fields = {"world_size": manifest.world_size, "rows": rows}
        except CorruptCheckpointError as error:
            self.report(worker, messages.RestoreReported(worker.rank, ref, str(error)))
            return
        except Exception as error:
            # Whatever it was: a worker that hears nothing would wait for ever.
            if not isinstance(error, StorageError):
                logger.exception("rank %d: no offer could be made", worker.rank)
            self._refuse(worker, ref, error)
            return
        with self._lock:
            # Threads of the pool overtake each other: what was offered since must not be overwritten.
            if worker.offered == (ref,):
                worker.send("offer", ref=ref_fields(ref), **fields)

    def report(self, worker: ConnectedWorker, report: messages.RestoreReported) -> None:
        """Pass on how a worker's newest offer went."""
        with self._lock:
            if worker.offered == (report.ref,):
                worker.reported = report
                self._tell(worker, report)
                self.proceed_if_verified(worker)

    def _refuse(self, worker: ConnectedWorker, ref: CheckpointRef | None, error: Exception) -> None:
        """End a worker that cannot read its checkpoint, which may be whole all the same.

        An older one in its place would leave the newer one behind for good.
        """
        step = ref.step if ref else 0
        worker.send(
            "refuse",
            message=f"step {step} cannot be read at present, and an older step is not restored in its place; "
            f"start again when the store answers, or choose one with resume=<step>: {error}",
            is_mismatch=False,
        )

    def proceed_if_verified(self, worker: ConnectedWorker) -> None:
        """Let a worker load what all ranks load, once that is what it has verified last.

        One that has been offered nothing by this agent has verified it with the agent before.
        """
        if worker.decided is None:
            return
        (ref,) = worker.decided
        report = worker.reported
        is_verified = report is not None and report.ref == ref and report.error is None
        if worker.offered is None or is_verified:
            worker.send("proceed", ref=ref_fields(ref))

    def _fetch_offer(self, ref: CheckpointRef) -> tuple[layout.Manifest, list[Any]]:
        # One fetch per node, whoever comes first.
        with self._offers_lock:
            if ref not in self._offers:
                manifest = self._run_store.read_manifest(ref)
                rows = [entry.to_row() for entry in self._run_store.read_layout(manifest)]
                self._offers[ref] = manifest, rows
            return self._offers[ref]

    def read(self, worker: ConnectedWorker, message: dict[str, Any]) -> None:
        """Have verified bytes in the worker's arena. Blocks; runs in the worker's own thread here."""
        ref = parse_ref(message["ref"])
        assert ref is not None
        wanted = [Read(*row) for row in message["reads"]]
        progress = Progress(f"restoring step {ref.step}", sum(read.num_bytes for read in wanted))
        by_shard: dict[int, list[Read]] = {}
        for read in wanted:
            by_shard.setdefault(read.rank, []).append(read)
        num_held_bytes = 0
        try:
            manifest, _ = self._fetch_offer(ref)
            for rank, reads in sorted(by_shard.items()):
                num_held_bytes += self._read_shard(worker, manifest, rank, reads, progress.add)
        except CorruptCheckpointError as error:
            worker.send("read_done", ref=message["ref"], error=str(error))
            return
        except StorageError as error:
            self._refuse(worker, ref, error)
            return
        except TransferCancelledError:
            # This agent is closing; the worker asks its successor.
            return
        worker.send(
            "read_done",
            ref=message["ref"],
            error=None,
            num_bytes=progress.num_bytes,
            num_memory_bytes=num_held_bytes,
        )

    def _read_shard(
        self,
        worker: ConnectedWorker,
        manifest: layout.Manifest,
        rank: int,
        reads: list[Read],
        on_progress: Callable[[int], None],
    ) -> int:
        """Have a shard's bytes in the worker's arena; return how many were there already."""
        sums = self._run_store.read_sums(manifest, rank)
        key = f"{layout.checkpoint_prefix(manifest.ref)}/{manifest.shards[rank].name}"
        missing = _source_reads(reads)
        num_held_bytes = 0
        if worker.adopted is not None and worker.adopted == (manifest.ref, rank):
            in_place = _source_reads(read for read in reads if read.source == read.destination)
            elsewhere = _source_reads(read for read in reads if read.source != read.destination)
            absent = find_missing(in_place, worker.fd, offset=PAGE_BYTES, sums=sums)
            num_held_bytes = sum(r.length for r in in_place) - sum(r.length for r in absent)
            missing = elsewhere + absent
        try:
            download(
                self._run_store.store,
                key,
                missing,
                worker.fd,
                sums=sums,
                parallel=self._parallel,
                cancelled=self._closed,
                on_progress=on_progress,
            )
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(
                f"step {manifest.ref.step} is incomplete: {key} does not exist",
                step=manifest.ref.step,
                key=key,
            ) from error
        return num_held_bytes


def _source_reads(reads: Iterable[Read]) -> list[SourceRead]:
    return [SourceRead(read.source, read.num_bytes, PAGE_BYTES + read.destination) for read in reads]
