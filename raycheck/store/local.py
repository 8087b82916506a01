"""Objects as local files: durable when written, never visible half-written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from raycheck.errors import StorageError
from raycheck.store.backend import Bytes, ObjectInfo, Page, PartLimits
from raycheck.store.location import Location

_BLOCK_BYTES = 4096
"""Writes past the page cache begin and end at a multiple of the disk's block, in the file and in memory."""

_DIRECT_FROM_BYTES = 1 << 20
_WRITE_OUT_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2
_KEEP_SIZE = 1

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate", None)
_sync_file_range = getattr(_libc, "sync_file_range", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint)

_FULL = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a larger file than this process or file system allows (ulimit -f)",
}

_RETRY_MISSING_S = 10.0

PARTIAL_FOLDER = ".raycheck-partial"
"""Files under way, below the root: on the same file system, and no listing shows them."""


class LocalBackend:
    """Files below a folder.

    A file is written under a temporary name, synced, renamed, and its folder
    synced: after ``put`` or ``complete`` returns it survives a power cut, and
    at no time does its name lead to part of it. The root need not exist.

    Args:
        location: The folder.
        pwrite: How bytes are written; a test passes a disk that fills up.
    """

    parts_are_independent = True
    takes_views = True

    def __init__(self, location: Location, *, pwrite: Callable[..., int] = os.pwrite) -> None:
        # Two, so that the disk has one to write while the next is summed; more wait for each other.
        self.limits = PartLimits(
            min_part_bytes=1, max_parts=1 << 30, default_part_bytes=8 << 20, max_parallel=2
        )
        self._root = location.root
        self._pwrite = pwrite

    def put(self, key: str, data: Bytes, crc32c: int) -> None:
        """Write a whole object."""
        upload = self.begin_upload(key, len(data))
        try:
            upload.write_part(0, 0, data, crc32c)
            upload.complete()
        except BaseException:
            upload.abort()
            raise

    def begin_upload(self, key: str, size_bytes: int) -> LocalUpload:
        """Start an object that is written in parts."""
        return LocalUpload(self._root, self._path(key), size_bytes, self._pwrite)

    def get(self, key: str, most_bytes: int) -> bytes:
        """Return an object, or its first bytes."""
        with open(self._path(key), "rb") as file:
            return file.read(most_bytes)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` on; return fewer bytes at the end of the object."""
        descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            filled = 0
            while filled < len(buffer):
                count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
                if count == 0:
                    break
                filled += count
            return filled
        finally:
            os.close(descriptor)

    def size_bytes(self, key: str) -> int:
        """Return the size."""
        status = os.stat(self._path(key))
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(self._path(key))
        return status.st_size

    def list_page(self, folder: str, token: str | None, *, recursive: bool) -> Page:
        """Return what is below a folder."""
        path = self._path(folder) if folder else self._root
        prefix = f"{folder}/" if folder else ""
        if recursive:
            return Page([ObjectInfo(prefix + name, size) for name, size in _walk(path)])
        page = Page([])
        for entry in _scan(path):
            if entry.is_dir():
                page.folders.append(prefix + entry.name)
            else:
                page.objects.extend(ObjectInfo(prefix + entry.name, size) for size in _size(entry))
        return page

    def delete(self, keys: Sequence[str]) -> None:
        """Delete what is there."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self._path(key))
        # Deepest first, so that a folder is tried after all folders in it.
        folders = {parent for key in keys for parent in _parents(key)}
        for folder in sorted(folders, key=lambda name: -name.count("/")):
            with contextlib.suppress(OSError):
                os.rmdir(self._path(folder))

    def sweep_uploads(self, older_than_s: float) -> list[str]:
        """Remove uploads that were left over."""
        swept = []
        for entry in _scan(os.path.join(self._root, PARTIAL_FOLDER), partial=True):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime >= older_than_s:
                    os.unlink(entry.path)
                    swept.append(f"{PARTIAL_FOLDER}/{entry.name}")
        return swept

    def refresh(self) -> None:
        """Files need no credentials."""

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)


class LocalUpload:
    """A temporary file that becomes the object.

    What is aligned in memory, as arenas are, goes from there to the disk, past
    the page cache: filling that costs several times as much processor time as
    everything else here, and throws out what the user's data set has there. The
    rest is written as ever, and all of it where the file system knows no other way.

    The file has its size from the start: several threads can write parts of it
    at the same time where they do not make it grow.
    """

    def __init__(self, root: str, path: str, size_bytes: int, pwrite: Callable[..., int]) -> None:
        self._root = root
        self._path = path
        self._size_bytes = size_bytes
        self._pwrite = pwrite
        folder = os.path.join(root, PARTIAL_FOLDER)
        os.makedirs(folder, exist_ok=True)
        self._temporary = os.path.join(folder, uuid.uuid4().hex)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._temporary, flags, 0o666)
        self._direct = _open_direct(self._temporary) if size_bytes >= _DIRECT_FROM_BYTES else None
        self._lock = threading.Lock()
        self._is_open = True
        self._is_direct_refused = False
        self._written_out_bytes = 0
        self._part_bytes: dict[int, int] = {}
        """By where each part begins: what is in the file for certain."""

        self._unsynced: dict[str, None] = {}
        try:
            reserve(self._descriptor, size_bytes)
            os.ftruncate(self._descriptor, size_bytes)
        except OSError as error:
            explained = self._explained(error)
            self.abort()
            raise explained from error

    def write_part(self, number: int, offset: int, data: Bytes, crc32c: int) -> None:
        """Write one part; several threads may, of different ones."""
        view = memoryview(data)
        try:
            done = self._write_directly(view, offset)
            if done < len(view):
                self._write_cached(view[done:], offset + done)
        except OSError as error:
            raise self._explained(error) from error
        with self._lock:
            self._part_bytes[offset] = len(view)

    def _write_directly(self, view: memoryview, offset: int) -> int:
        """Write what can go past the page cache; return how many bytes, from the first on, that were."""
        if self._direct is None or self._is_direct_refused:
            return 0
        if offset % _BLOCK_BYTES or _address_of(view) % _BLOCK_BYTES:
            return 0
        end, done = len(view) - len(view) % _BLOCK_BYTES, 0
        try:
            # A write that was cut short in the middle of a block cannot go on like this.
            while done < end and done % _BLOCK_BYTES == 0:
                done += self._pwrite(self._direct, view[done:end], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This file system takes the flag, and no such write.
            self._is_direct_refused = True
        return done

    def _write_cached(self, view: memoryview, offset: int) -> None:
        while view:
            count = self._pwrite(self._descriptor, view, offset)
            view, offset = view[count:], offset + count
        with self._lock:
            first = self._written_out_bytes
            is_due = offset - first >= _WRITE_OUT_BYTES
            if is_due:
                self._written_out_bytes = offset
        if is_due:
            begin_write_out(self._descriptor, first, offset - first)

    def complete(self) -> None:
        """Make the object visible and durable."""
        if self._is_open:
            try:
                # What is missing shows in the size of the object.
                os.ftruncate(self._descriptor, sum(self._part_bytes.values()))
                os.fsync(self._descriptor)
            except OSError as error:
                raise self._explained(error) from error
            self._close()
        _retry_missing(self._publish)

    def _publish(self) -> None:
        folder = os.path.dirname(self._path)
        # Nothing is synced before the file is there: a delete elsewhere removes folders that are empty,
        # and finds hardly one between its creation and the rename.
        for made in create_folders(folder):
            self._unsynced[os.path.dirname(made)] = None
        # A second call, after a first one that got this far, finds the work done.
        if os.path.exists(self._temporary):
            os.replace(self._temporary, self._path)
        for changed in (*self._unsynced, folder):
            sync_folder(changed)

    def abort(self) -> None:
        """Leave nothing behind."""
        self._close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def _close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._descriptor)
                if self._direct is not None:
                    os.close(self._direct)

    def _explained(self, error: OSError) -> OSError:
        if error.errno not in _FULL:
            return error
        status = os.statvfs(self._root)
        free_bytes = status.f_bavail * status.f_frsize
        return StorageError(
            f"cannot write {self._path}: {_FULL[error.errno]}: it needs {self._size_bytes} bytes, "
            f"{free_bytes} are free; the next save tries again",
            key=os.path.relpath(self._path, self._root),
            operation="write",
            needed_bytes=self._size_bytes,
            free_bytes=free_bytes,
        )


def _open_direct(path: str) -> int | None:
    """Open a file for writes past the page cache; None where there are none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    # No such flag, or a file system that does not take it.
    except (AttributeError, OSError):
        return None


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 1


def reserve(descriptor: int, num_bytes: int) -> None:
    """Have the disk set space aside, where the file system can: a full disk shows at once.

    Raises:
        OSError: If there is no space.
    """
    if _fallocate is None or num_bytes == 0:
        return
    if _fallocate(descriptor, _KEEP_SIZE, 0, num_bytes) != 0:
        code = ctypes.get_errno()
        # The others say that this file system cannot, not that the disk is full.
        if code in _FULL:
            raise OSError(code, os.strerror(code))


def begin_write_out(descriptor: int, offset: int, num_bytes: int) -> None:
    """Start the disk on what has been written so far; `fsync` then waits for the rest alone."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


def _retry_missing(action: Callable[[], None]) -> None:
    """Run ``action`` again if a folder vanished under it: a delete elsewhere removes folders it empties."""
    end_s = time.monotonic() + _RETRY_MISSING_S
    while True:
        try:
            return action()
        except FileNotFoundError:
            if time.monotonic() > end_s:
                raise
        # Out of step with whoever deletes.
        time.sleep(random.uniform(0, 0.002))


def make_folders(path: str) -> None:
    """Create a folder and its parents; each new name is durable on return."""
    for folder in create_folders(path):
        sync_folder(os.path.dirname(folder))


def create_folders(path: str) -> list[str]:
    """Create a folder and its parents; return those that were missing, the outermost first."""
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    for folder in missing:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
    return missing


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _scan(path: str, *, partial: bool = False) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if partial or entry.name != PARTIAL_FOLDER]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk(path: str) -> Iterator[tuple[str, int]]:
    """Yield every file below, as (name relative to ``path``, size)."""
    for entry in _scan(path):
        if entry.is_dir():
            yield from ((f"{entry.name}/{name}", size) for name, size in _walk(entry.path))
        else:
            yield from ((entry.name, size) for size in _size(entry))


def _size(entry: os.DirEntry[str]) -> Iterator[int]:
    """Yield the size, or nothing when the file has just been deleted."""
    with contextlib.suppress(FileNotFoundError):
        yield entry.stat().st_size


def _parents(key: str) -> Iterator[str]:
    while "/" in key:
        key = key.rpartition("/")[0]
        yield key
