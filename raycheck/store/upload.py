"""From a file descriptor into the store: read, sum and sent in one pass."""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from raycheck.core.sums import ChunkSums
from raycheck.errors import RaycheckError, StorageError
from raycheck.store.backend import Backend, Bytes, PartUpload
from raycheck.store.checksum import join_sums, sum_chunks
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.spans import Part, plan_parts
from raycheck.store.transfer import (
    TokenBucket,
    TransferCancelledError,
    pread_fully,
    run_parallel,
    sleep_unless,
)

logger = logging.getLogger(__name__)

_ABORT_RETRY = RetryPolicy(budget_s=5.0)

T = TypeVar("T")
Send = Callable[[Part, Bytes, int], None]


class Mapping:
    """A file in this process's memory, for as long as anybody uploads from it time and again.

    Made anew for each upload, its pages take a quarter of the time in which a disk
    writes what they show. They count as this process's memory as well, though
    there is no second copy.
    """

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def view(self, descriptor: int, end: int) -> memoryview:
        """Return the file's bytes up to ``end`` at least; the descriptor is always that of one file.

        Raises:
            StorageError: If the file ends before.
        """
        if len(self._view) < end:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes < end:
                # Reading beyond the end of a mapped file kills the process.
                raise StorageError(
                    f"the source of an upload ends at byte {size_bytes}, before {end}",
                    operation="read source",
                )
            # What is mapped already goes with its last user.
            self._view = memoryview(mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ))
        return self._view


def upload(
    store: Store,
    key: str,
    source: int,
    *,
    source_offset: int = 0,
    size_bytes: int,
    chunk_bytes: int,
    parallel_parts: int,
    cancelled: threading.Event,
    bytes_per_s: float | TokenBucket | None = None,
    on_progress: Callable[[int], None] | None = None,
    mapping: Mapping | None = None,
) -> ChunkSums:
    """Write ``size_bytes`` of a file as one object and return its checksums.

    Blocks until the object is durable and its stored size has been looked up.
    The source is read in parts, each once unless the store takes streams only
    and fails: with ``pread``, or through a mapping where the store takes views,
    so it must not become shorter meanwhile. Memory is ``parallel_parts`` times
    the part size at most, whatever the object's. If it raises, nothing is left in the store, no
    unfinished upload either, as far as the store can still be reached.

    Args:
        store: Where to.
        key: The object; it should not exist, and readers see it when it is whole.
        source: A file descriptor; its position is neither used nor moved.
        source_offset: Where the object begins in the source.
        size_bytes: Its size, at least 1.
        chunk_bytes: Each so many bytes get a checksum.
        parallel_parts: Requests at a time.
        cancelled: Set it to give up; seen between parts and while waiting.
        bytes_per_s: A limit for this upload, or a bucket that several share.
        on_progress: Called with the number of bytes of each part that was sent,
            from several threads; a stream that starts again counts again.
        mapping: Of the source, for whoever uploads from it again.

    Raises:
        TransferCancelledError: If ``cancelled`` was set.
        StorageError: If it could not be written, or was stored with another size.
    """
    if size_bytes < 1:
        raise ValueError(f"size_bytes={size_bytes} of {key}: no empty objects")
    bucket = bytes_per_s if isinstance(bytes_per_s, TokenBucket | None) else TokenBucket(bytes_per_s)
    is_stream = not store.backend.parts_are_independent
    job = _Upload(
        store=store,
        key=key,
        source=source,
        source_offset=source_offset,
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
        cancelled=cancelled,
        bucket=bucket,
        on_progress=on_progress or (lambda num_bytes: None),
        mapping=mapping or Mapping(),
        is_stream=is_stream,
    )
    if is_stream:
        # A stream cannot take a part again: the whole object is one attempt.
        sums = store.run("write", key, lambda _: job.run(1), sleep=job.sleep)
    else:
        sums = job.run(parallel_parts)
    job.check_size()
    return sums


@dataclasses.dataclass(slots=True, kw_only=True)
class _Upload:
    """One object on its way."""

    store: Store
    key: str
    source: int
    source_offset: int
    size_bytes: int
    chunk_bytes: int
    cancelled: threading.Event
    bucket: TokenBucket | None
    on_progress: Callable[[int], None]
    mapping: Mapping
    is_stream: bool
    """Whether the store takes the object in one go, and again from the start after a failure."""

    sums: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """By the number of the part."""

    def sleep(self, seconds: float) -> None:
        """Wait; end at once with an error when the upload is cancelled."""
        sleep_unless(self.cancelled, self.key)(seconds)

    def run(self, parallel_parts: int) -> ChunkSums:
        limits = self.store.backend.limits
        parts = plan_parts(self.size_bytes, chunk_bytes=self.chunk_bytes, limits=limits)
        if len(parts) == 1:
            self._send_all(parts, 1, self._put)
        else:
            self._send_parts(parts, min(parallel_parts, len(parts), limits.max_parallel))
        sums = tuple(value for part in parts for value in self.sums[part.number])
        return ChunkSums(self.chunk_bytes, self.size_bytes, sums)

    def check_size(self) -> None:
        stored_bytes = self.store.run(
            "look up", self.key, lambda backend: backend.size_bytes(self.key), sleep=self.sleep
        )
        if stored_bytes != self.size_bytes:
            self.store.delete([self.key])
            raise StorageError(
                f"{self.store.url}/{self.key} was stored with {stored_bytes} bytes "
                f"where {self.size_bytes} were sent; it has been deleted",
                key=self.key,
                operation="write",
                stored_bytes=stored_bytes,
                size_bytes=self.size_bytes,
            )

    def _call(self, operation: str, attempt: Callable[[Backend], T]) -> T:
        """Return ``attempt``'s result, with retries unless the whole stream will be retried."""
        if self.is_stream:
            return attempt(self.store.backend)
        return self.store.run(operation, self.key, attempt, sleep=self.sleep)

    def _put(self, part: Part, data: Bytes, crc32c: int) -> None:
        self._call("write", lambda backend: backend.put(self.key, data, crc32c))

    def _send_parts(self, parts: list[Part], num_threads: int) -> None:
        under_way: PartUpload = self._call(
            "begin writing", lambda backend: backend.begin_upload(self.key, self.size_bytes)
        )

        def send(part: Part, data: Bytes, crc32c: int) -> None:
            self._call("write", lambda _: under_way.write_part(part.number, part.offset, data, crc32c))

        try:
            self._send_all(parts, num_threads, send)
            self._call("finish writing", lambda _: under_way.complete())
        except BaseException:
            self._abort(under_way)
            raise

    def _send_all(self, parts: list[Part], num_threads: int, send: Send) -> None:
        def work(part: Part, buffer: bytearray) -> None:
            view = memoryview(buffer)[: part.length]
            pread_fully(self.source, view, self.source_offset + part.offset)
            # HTTP clients want a whole bytearray; only the last part is copied for that.
            self._sum_and_send(part, buffer if part.length == len(buffer) else bytes(view), send)

        if self.store.backend.takes_views:
            self._send_views(parts, num_threads, send)
            return
        run_parallel(
            parts,
            work,
            num_threads=num_threads,
            buffer_bytes=parts[0].length,
            check=lambda: self.sleep(0),
        )

    def _send_views(self, parts: list[Part], num_threads: int, send: Send) -> None:
        """Send parts of the mapped source: no copy of ours, where the kernel makes one anyway."""
        source = self.mapping.view(self.source, self.source_offset + self.size_bytes)

        def work(part: Part, _: bytearray) -> None:
            begin = self.source_offset + part.offset
            with source[begin : begin + part.length] as view:
                self._sum_and_send(part, view, send)

        run_parallel(parts, work, num_threads=num_threads, buffer_bytes=0, check=lambda: self.sleep(0))

    def _sum_and_send(self, part: Part, data: Bytes, send: Send) -> None:
        sums = sum_chunks(data, self.chunk_bytes)
        crc32c = join_sums(sums, chunk_bytes=self.chunk_bytes, size_bytes=part.length)
        if self.bucket:
            self.bucket.acquire(part.length, self.sleep)
        send(part, data, crc32c)
        self.sums[part.number] = sums
        self.on_progress(part.length)

    def _abort(self, under_way: PartUpload) -> None:
        try:
            self.store.run("abort writing", self.key, lambda _: under_way.abort(), retry=_ABORT_RETRY)
        except RaycheckError as error:
            logger.warning("%s; the sweep for left-over uploads will remove it", error)


__all__ = ["Mapping", "TokenBucket", "TransferCancelledError", "upload"]
