"""Stores that misbehave, for tests of code that uses one.

A fault is an object that is put between a store and what it stands on:

    fault = FailNth(2, "write")
    store = Store(url, connect=FaultyConnect(fault))
    ...
    assert fault.num_fired == 1

Each counts how often it fired; a test that never met its fault proves nothing.
Operations are "write" (whole objects), "begin", "part", "complete", "abort",
"read", "size", "list", "delete", "sweep"; where none is named, all are meant.
Faults are called from the store's threads, and count under a lock. No Ray is
needed here.
"""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from botocore.exceptions import ClientError
from fsspec.implementations.memory import MemoryFileSystem

from raycheck.store.backend import Backend, Bytes, Page, PartLimits, PartUpload
from raycheck.store.checksum import checksum
from raycheck.store.location import Location
from raycheck.store.objects import connect as connect_directly

T = TypeVar("T")

__all__ = [
    "BufferedFileSystem",
    "CutParts",
    "DropLastBuffer",
    "ExpireCredentials",
    "FailNth",
    "FailSome",
    "Fault",
    "FaultyBackend",
    "FaultyConnect",
    "FullDisk",
    "LoseReply",
    "RejectEmpty",
    "Slow",
    "StaleListing",
    "s3_error",
]


def s3_error(code: str, status: int = 400) -> ClientError:
    """Return an error as a server of S3 gives it, such as ``s3_error("SlowDown", 503)``."""
    answer = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "Test")


class Fault:
    """Does nothing wrong; the others override what they break.

    ``num_fired`` counts how often it did something, ``num_calls`` what it counted
    on the way, from 1.

    Args:
        *operations: Which it concerns. None named: all.
    """

    def __init__(self, *operations: str) -> None:
        self.operations = operations
        self.num_calls = 0
        self.num_fired = 0
        self.lock = threading.Lock()

    def applies_to(self, operation: str) -> bool:
        """Return whether this fault concerns an operation; without any named, all of them."""
        return not self.operations or operation in self.operations

    def fired(self) -> None:
        """Count one firing."""
        with self.lock:
            self.num_fired += 1

    def count_call(self) -> int:
        """Return the number of this call, from 1."""
        with self.lock:
            self.num_calls += 1
            return self.num_calls

    def before(self, operation: str, key: str) -> None:
        """Run before a call; may raise or wait."""

    def after(self, operation: str, key: str) -> None:
        """Run after a call that succeeded; may raise, which loses its reply."""

    def change_data(self, operation: str, data: Bytes, is_last: bool) -> Bytes:
        """Return what is stored instead of ``data``."""
        return data

    def change_page(self, folder: str, page: Page) -> Page:
        """Return what is listed instead of ``page``."""
        return page

    def refreshed(self) -> None:
        """Run when the client is built anew."""


class Slow(Fault):
    """Every call of the operations takes ``delay_s`` seconds longer."""

    def __init__(self, delay_s: float, *operations: str) -> None:
        super().__init__(*operations)
        self.delay_s = delay_s

    def before(self, operation: str, key: str) -> None:
        """Wait."""
        self.fired()
        time.sleep(self.delay_s)


class FailNth(Fault):
    """Calls number ``nth`` (from 1) to ``nth + times - 1`` of the operations fail before anything is done.

    They raise ``error()``, by default what S3 answers when it is asked too often.
    """

    def __init__(
        self,
        nth: int,
        *operations: str,
        times: int = 1,
        error: Callable[[], Exception] = lambda: s3_error("SlowDown", 503),
    ) -> None:
        super().__init__(*operations)
        self.nth = nth
        self.times = times
        self.error = error

    def before(self, operation: str, key: str) -> None:
        """Fail if it is time to."""
        if self.nth <= self.count_call() < self.nth + self.times:
            self.fired()
            raise self.error()


class FailSome(Fault):
    """Calls fail with a lost connection where ``draw()`` is below ``share``; pass a seeded generator's ``random``."""

    def __init__(self, share: float, draw: Callable[[], float], *operations: str) -> None:
        super().__init__(*operations)
        self.share = share
        self.draw = draw

    def before(self, operation: str, key: str) -> None:
        """Fail by chance."""
        with self.lock:
            fails = self.draw() < self.share
        if fails:
            self.fired()
            raise ConnectionResetError("connection lost (test)")


class LoseReply(Fault):
    """Call number ``nth`` (from 1) of the operations is done, and then fails with a lost connection."""

    def __init__(self, nth: int, *operations: str) -> None:
        super().__init__(*operations)
        self.nth = nth

    def after(self, operation: str, key: str) -> None:
        """Fail if it is time to."""
        if self.count_call() == self.nth:
            self.fired()
            raise ConnectionResetError("reply lost (test)")


class ExpireCredentials(Fault):
    """After ``after_calls`` calls, all fail until the client is built anew, which helps ``renewals`` times."""

    def __init__(self, after_calls: int, *, renewals: int = 1) -> None:
        super().__init__()
        self.after_calls = after_calls
        self.renewals = renewals
        self.left = after_calls

    def before(self, operation: str, key: str) -> None:
        """Fail if the credentials have run out."""
        with self.lock:
            self.left -= 1
            if self.left >= 0:
                return
            self.num_fired += 1
        raise s3_error("ExpiredToken")

    def refreshed(self) -> None:
        """Start with new credentials, if there are any left."""
        with self.lock:
            if self.renewals > 0:
                self.renewals -= 1
                self.left = self.after_calls


class DropLastBuffer(Fault):
    """The last part of an object is cut by ``num_bytes``, and nobody says so."""

    def __init__(self, num_bytes: int = 1) -> None:
        super().__init__("part", "write")
        self.num_bytes = num_bytes

    def change_data(self, operation: str, data: Bytes, is_last: bool) -> Bytes:
        """Cut the end off."""
        if not is_last:
            return data
        self.fired()
        return bytes(data[: -self.num_bytes])


class RejectEmpty(Fault):
    """Empty objects and parts are refused.

    ``num_calls`` counts what was written, ``num_fired`` what was refused.
    """

    def __init__(self) -> None:
        super().__init__("part", "write")

    def change_data(self, operation: str, data: Bytes, is_last: bool) -> Bytes:
        """Refuse if there is nothing."""
        self.count_call()
        if not data:
            self.fired()
            raise s3_error("InvalidRequest")
        return data


class StaleListing(Fault):
    """Each folder's first listing is served again and again: what raycheck must refuse when a job starts."""

    def __init__(self) -> None:
        super().__init__("list")
        self.pages: dict[str, Page] = {}

    def change_page(self, folder: str, page: Page) -> Page:
        """Return what was there the first time."""
        if folder in self.pages:
            self.fired()
        return self.pages.setdefault(folder, page)


class CutParts(Fault):
    """Objects are uploaded under other limits, so that small ones have many parts."""

    def __init__(self, limits: PartLimits) -> None:
        super().__init__()
        self.limits = limits


class FullDisk:
    """An ``os.pwrite`` that writes ``capacity_bytes`` and then raises ``OSError`` with ``ENOSPC``."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_fired = 0

    def __call__(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write what fits."""
        if self.capacity_bytes <= 0:
            self.num_fired += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.pwrite(descriptor, data[: self.capacity_bytes], offset)
        self.capacity_bytes -= count
        return count


class BufferedFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system of its own in memory, which writes on close and has no file descriptors.

    Pass it as ``FsspecBackend(location, {}, make=lambda **options: file_system)``.

    Args:
        drop_bytes: So many bytes at the end of each file are lost, and nobody
            says so; ``num_fired`` counts how often.
    """

    cachable = False

    def __init__(self, *, drop_bytes: int = 0) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        self.drop_bytes = drop_bytes
        self.num_fired = 0

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Return a file; one that is written appears when it is closed."""
        if mode != "wb":
            return super().open(path, mode, **options)
        return _BufferedFile(self, path)

    def finish(self, path: str, data: bytes) -> None:
        """Store what a file buffered."""
        if self.drop_bytes:
            self.num_fired += 1
        self.pipe_file(path, data[: len(data) - self.drop_bytes])

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Store a whole file."""
        super().open(path, "wb", data=value).close()


class _BufferedFile(io.BytesIO):
    def __init__(self, file_system: BufferedFileSystem, path: str) -> None:
        super().__init__()
        self._file_system: BufferedFileSystem | None = file_system
        self._path = path

    def close(self) -> None:
        file_system, self._file_system = self._file_system, None
        if file_system:
            file_system.finish(self._path, self.getvalue())
        super().close()

    def discard(self) -> None:
        self._file_system = None


class FaultyConnect:
    """A ``connect`` for ``Store`` that puts faults before the real one, in the order given."""

    def __init__(
        self, *faults: Fault, connect: Callable[[Location, Mapping[str, Any]], Backend] = connect_directly
    ) -> None:
        self.faults = faults
        self.connect = connect

    def __call__(self, location: Location, options: Mapping[str, Any]) -> Backend:
        """Return the backend with the faults before it."""
        return FaultyBackend(self.connect(location, options), *self.faults)


class FaultyBackend:
    """A backend with faults before it."""

    def __init__(self, inner: Backend, *faults: Fault) -> None:
        self.inner = inner
        self.faults = faults
        self.limits = next((f.limits for f in faults if isinstance(f, CutParts)), inner.limits)
        self.parts_are_independent = inner.parts_are_independent
        self.takes_views = inner.takes_views

    def put(self, key: str, data: Bytes, crc32c: int) -> None:
        """Write a whole object."""
        changed = self.change_data("write", data, is_last=True)
        self.around("write", key, lambda: self.inner.put(key, changed, _crc(data, changed, crc32c)))

    def begin_upload(self, key: str, size_bytes: int) -> PartUpload:
        """Start an object that is written in parts."""
        upload = self.around("begin", key, lambda: self.inner.begin_upload(key, size_bytes))
        return _FaultyUpload(self, upload, key, size_bytes)

    def get(self, key: str, most_bytes: int) -> bytes:
        """Return an object, or its first bytes."""
        return self.around("read", key, lambda: self.inner.get(key, most_bytes))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer``."""
        return self.around("read", key, lambda: self.inner.read_into(key, offset, buffer))

    def size_bytes(self, key: str) -> int:
        """Return the size."""
        return self.around("size", key, lambda: self.inner.size_bytes(key))

    def list_page(self, folder: str, token: str | None, *, recursive: bool) -> Page:
        """Return what is below a folder."""
        page = self.around("list", folder, lambda: self.inner.list_page(folder, token, recursive=recursive))
        for fault in self.faults:
            page = fault.change_page(folder, page)
        return page

    def delete(self, keys: Sequence[str]) -> None:
        """Delete what is there."""
        self.around("delete", keys[0], lambda: self.inner.delete(keys))

    def sweep_uploads(self, older_than_s: float) -> list[str]:
        """Remove uploads that were left over."""
        return self.around("sweep", "", lambda: self.inner.sweep_uploads(older_than_s))

    def refresh(self) -> None:
        """Build the client anew."""
        self.inner.refresh()
        for fault in self.faults:
            fault.refreshed()

    def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
        """Return ``call()`` with the faults around it."""
        faults = [fault for fault in self.faults if fault.applies_to(operation)]
        for fault in faults:
            fault.before(operation, key)
        result = call()
        for fault in faults:
            fault.after(operation, key)
        return result

    def change_data(self, operation: str, data: Bytes, *, is_last: bool) -> Bytes:
        """Return what is stored instead of ``data``."""
        for fault in self.faults:
            if fault.applies_to(operation):
                data = fault.change_data(operation, data, is_last)
        return data


class _FaultyUpload:
    def __init__(self, backend: FaultyBackend, inner: PartUpload, key: str, size_bytes: int) -> None:
        self._backend = backend
        self._inner = inner
        self._key = key
        self._size_bytes = size_bytes

    def write_part(self, number: int, offset: int, data: Bytes, crc32c: int) -> None:
        is_last = offset + len(data) == self._size_bytes
        changed = self._backend.change_data("part", data, is_last=is_last)
        crc = _crc(data, changed, crc32c)
        self._backend.around("part", self._key, lambda: self._inner.write_part(number, offset, changed, crc))

    def complete(self) -> None:
        self._backend.around("complete", self._key, self._inner.complete)

    def abort(self) -> None:
        self._backend.around("abort", self._key, self._inner.abort)


def _crc(data: Bytes, changed: Bytes, crc32c: int) -> int:
    """Return the checksum that goes with changed data, so that the server finds nothing wrong."""

    return crc32c if changed is data else checksum(changed)
