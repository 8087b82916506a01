"""What uploads and downloads share: threads with a buffer each, cancelling, a rate limit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from raycheck.errors import StorageError

T = TypeVar("T")


class TransferCancelledError(StorageError):
    """A transfer was given up because its ``cancelled`` event was set."""


class TokenBucket:
    """A limit in bytes per second that any number of transfers may share.

    A transfer goes at once if the limit allows, and whoever comes next waits
    for the time that it took; so the mean rate holds for parts of any size.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={bytes_per_s}: must be more than 0")
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = float("-inf")

    def reserve(self, num_bytes: int, *, now_s: float) -> float:
        """Take ``num_bytes`` and return the seconds to wait before sending them."""
        with self._lock:
            start_s = max(self._free_at_s, now_s)
            self._free_at_s = start_s + num_bytes / self._bytes_per_s
            return start_s - now_s

    def acquire(self, num_bytes: int, sleep: Callable[[float], None]) -> None:
        """Block until ``num_bytes`` may be sent."""
        wait_s = self.reserve(num_bytes, now_s=time.monotonic())
        if wait_s > 0:
            sleep(wait_s)


def sleep_unless(cancelled: threading.Event, key: str) -> Callable[[float], None]:
    """Return a ``sleep`` that raises ``TransferCancelledError`` as soon as the event is set."""

    def sleep(seconds: float) -> None:
        if cancelled.wait(seconds):
            raise TransferCancelledError(f"transfer of {key} was cancelled", key=key, operation="transfer")

    return sleep


def run_parallel(
    tasks: Iterable[T],
    work: Callable[[T, bytearray], None],
    *,
    num_threads: int,
    buffer_bytes: int,
    check: Callable[[], None],
) -> None:
    """Call ``work(task, buffer)`` for every task, in order of the tasks, from several threads.

    Blocks until every call has returned. Each thread has one buffer and uses it
    again for each task. After the first failure no task is begun.

    Args:
        tasks: Taken one at a time.
        work: May overwrite the buffer.
        num_threads: How many tasks run at a time; one runs in the calling thread.
        buffer_bytes: Size of each buffer.
        check: Called before each task; may raise to stop.

    Raises:
        BaseException: The first failure of ``check`` or ``work``.
    """
    remaining = iter(tasks)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def next_tasks() -> Iterable[T]:
        while True:
            with lock:
                if failures:
                    return
                try:
                    task = next(remaining)
                except StopIteration:
                    return
            yield task

    def loop() -> None:
        buffer = bytearray(buffer_bytes)
        try:
            for task in next_tasks():
                check()
                work(task, buffer)
        except BaseException as error:  # noqa: BLE001  (raised again by the caller's thread)
            with lock:
                failures.append(error)

    threads = [
        threading.Thread(target=loop, name=f"raycheck-transfer-{n}", daemon=True)
        for n in range(1, num_threads)
    ]
    for thread in threads:
        thread.start()
    loop()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def pread_fully(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from a file.

    Raises:
        StorageError: If the file ends before.
    """
    filled = 0
    while filled < len(buffer):
        count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
        if count == 0:
            raise StorageError(
                f"the source of an upload ends at byte {offset + filled}", operation="read source"
            )
        filled += count


def pwrite_fully(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` to a file."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
