"""``Store``: objects under one root, with retries, fresh credentials and our errors."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from raycheck.core.sums import MAX_OBJECT_BYTES
from raycheck.errors import CorruptCheckpointError, StorageError
from raycheck.store.backend import Backend, ObjectInfo
from raycheck.store.checksum import checksum
from raycheck.store.failures import judge, to_storage_error
from raycheck.store.generic import FsspecBackend
from raycheck.store.local import LocalBackend
from raycheck.store.location import Location, check_key, is_key, parse_location
from raycheck.store.retry import RetryPolicy, Verdict, run_with_retries
from raycheck.store.s3 import S3Backend

T = TypeVar("T")
Connect = Callable[[Location, Mapping[str, Any]], Backend]

logger = logging.getLogger("raycheck")

PROBE_BUDGET_S = 8.0
"""Retries of a probe: with the timeouts of the client it fails within about 15 s."""

_TELL_AFTER_S, _TELL_EVERY_S = 10.0, 60.0
"""When people hear of calls that are tried again and again."""

PROBE_FOLDER = "raycheck-probe"

_FOLDER_CHECKS = 8


MAX_WHOLE_BYTES = 1 << 30
"""More than any layout, manifest or record has; a reader's memory must not depend on what lies in the store."""


def connect(location: Location, options: Mapping[str, Any]) -> Backend:
    """Return the backend for a location: files, S3, or whatever fsspec has."""
    if location.scheme == "file":
        return LocalBackend(location)
    if location.scheme == "s3":
        return S3Backend(location, options)
    return FsspecBackend(location, options)


class Store:
    """Objects under one root URL.

    Keys are names joined by "/", relative to the root. All methods block, may
    be called from any thread, and retry what can pass (throttling, server and
    network errors, expired credentials) for ``retry.budget_s`` per call. Call
    them from a thread, not from an event loop that has other work.

    The client is made on first use in each process, so a store may be passed to
    other processes and survives a fork. Pickling it passes ``url`` and
    ``options`` on, secrets included; ``repr`` shows none.

    Args:
        url: A path, or a URL such as "s3://bucket/prefix"; Ray's
            "?endpoint_override=host:port&scheme=http" is understood.
        options: Of the fsspec file system, such as ``{"endpoint_url": ...}``.
            They win over the URL's. Local files use none.
        retry: How long and how often to retry.
        connect: How the backend is made; a test wraps faults around it. It must
            be picklable if the store is to be.
        sleep: How to wait between attempts.

    Raises:
        ConfigError: If the URL is not usable. Nothing is contacted yet.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        options: Mapping[str, Any] | None = None,
        *,
        retry: RetryPolicy | None = None,
        connect: Connect = connect,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.location = parse_location(url)
        self.retry = retry or RetryPolicy()
        self._options = _merged(self.location.options, options or {})
        self._connect = connect
        self._sleep = sleep
        self.num_retries = 0
        self.num_refreshes = 0
        self._told_s = float("-inf")
        self._pid = -1
        self._lock = threading.Lock()
        self._backend: Backend | None = None

    def with_retry(self, retry: RetryPolicy) -> Store:
        """Return the same objects, asked for with another policy."""
        return Store(self.url, self._options, retry=retry, connect=self._connect, sleep=self._sleep)

    @property
    def url(self) -> str:
        """The normalised root, without options or secrets."""
        return self.location.url

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.url, self._options, self.retry, self._connect))

    def put(self, key: str, data: bytes) -> None:
        """Write a whole object; durable on return, never visible in part.

        Raises:
            StorageError: If it could not be written; it may exist all the same.
        """
        assert len(data) > 0, f"no empty objects: some stores refuse them ({key})"
        check_key(key)
        crc32c = checksum(data)
        self.run("write", key, lambda backend: backend.put(key, data, crc32c))

    def get(self, key: str) -> bytes:
        """Return a whole object, at most `MAX_WHOLE_BYTES` of it.

        Raises:
            ObjectNotFoundError: If it is not there.
            CorruptCheckpointError: If it is larger: nothing that raycheck reads whole is.
            StorageError: If it could not be read.
        """
        check_key(key)
        data = self.run("read", key, lambda backend: backend.get(key, MAX_WHOLE_BYTES + 1))
        if len(data) > MAX_WHOLE_BYTES:
            raise CorruptCheckpointError(
                f"{self.url}/{key} has more than {MAX_WHOLE_BYTES} bytes and was not written by raycheck",
                key=key,
            )
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on, fewer if the object ends before.

        Raises:
            ObjectNotFoundError: If the object is not there.
            StorageError: If it could not be read.
        """
        buffer = bytearray(length)
        filled = self.read_into(key, offset, memoryview(buffer))
        return bytes(buffer[:filled])

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` on and return how many bytes there were."""
        check_key(key)
        if offset < 0 or offset > MAX_OBJECT_BYTES:
            raise ValueError(f"offset {offset} of {key}")
        if len(buffer) == 0:
            return 0
        return self.run("read", key, lambda backend: backend.read_into(key, offset, buffer))

    def size_bytes(self, key: str) -> int:
        """Return the size of an object, fresh from the store.

        Raises:
            ObjectNotFoundError: If it is not there.
        """
        check_key(key)
        return self.run("look up", key, lambda backend: backend.size_bytes(key))

    def list_keys(self, prefix: str = "") -> list[ObjectInfo]:
        """Return all objects below the folder ``prefix``, sorted, fresh from the store.

        "run1" does not list what is below "run10". A folder that is not there
        is empty. Folder placeholders and files under way are no objects.
        """
        return sorted(info for info in self._list(_folder(prefix)) if is_key(info.key))

    def list_children(self, prefix: str = "") -> list[str]:
        """Return the names directly below the folder ``prefix``, sorted, fresh from the store.

        Objects and folders alike; a folder with no object below is left out.
        """
        folder = _folder(prefix)
        start = len(folder) + 1 if folder else 0
        names, folders = set(), set()
        token = None
        while True:
            page = self._page(folder, token, recursive=False)
            names |= {info.key[start:] for info in page.objects if is_key(info.key)}
            folders |= {key for key in page.folders if is_key(key)}
            token = page.next_token
            if token is None:
                break
        if folders:
            with ThreadPoolExecutor(min(_FOLDER_CHECKS, len(folders))) as pool:
                candidates = sorted(folders)
                is_full = pool.map(self._has_objects, candidates)
                names |= {key[start:] for key, full in zip(candidates, is_full, strict=True) if full}
        return sorted(names)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error.

        Local folders that become empty go too.

        Raises:
            StorageError: If one could not be deleted; others may be gone.
        """
        checked = [check_key(key) for key in keys]
        if checked:
            self.run("delete", checked[0], lambda backend: backend.delete(checked))

    def sweep_uploads(self, older_than_s: float) -> list[str]:
        """Abort uploads under this root that were left over by killed processes; return their keys.

        Args:
            older_than_s: Spare uploads that began (local files: were written to)
                less than this ago: their writer may be alive.
        """
        return self.run("sweep uploads of", "", lambda backend: backend.sweep_uploads(older_than_s))

    def probe(self) -> None:
        """Write, list, read and delete one small object: what a run will need, tried before it starts.

        Takes four requests; fails within about 15 s when nobody answers.

        Raises:
            ConfigError: If the bucket is missing or an option is wrong.
            StoragePermissionError: If the credentials or permissions do not allow it.
            StorageError: If the store does not answer, or lists stale contents.
        """
        probe = Store(self.url, self._options, retry=_probing(self.retry), connect=self._connect)
        key, data = f"{PROBE_FOLDER}/{uuid.uuid4().hex}", os.urandom(16)
        # Listed first: a store may make a missing bucket on write, and what keeps listings must have one to keep.
        probe.list_keys(PROBE_FOLDER)
        probe.put(key, data)
        try:
            if ObjectInfo(key, len(data)) not in probe.list_keys(PROBE_FOLDER):
                raise StorageError(
                    f"storage {self.url}: an object was written but a fresh listing does not show it; "
                    "raycheck needs a store whose listings are consistent",
                    key=key,
                    operation="list",
                )
            if probe.get(key) != data:
                raise StorageError(
                    f"storage {self.url}: an object was read back with other contents",
                    key=key,
                    operation="read",
                )
        finally:
            probe.delete([key])

    def run(
        self,
        operation: str,
        key: str,
        attempt: Callable[[Backend], T],
        *,
        sleep: Callable[[float], None] | None = None,
        retry: RetryPolicy | None = None,
    ) -> T:
        """Return ``attempt(backend)``, with retries, and with our errors for the library's.

        Args:
            operation: A verb for messages.
            key: The object it is about, or "".
            attempt: One try.
            sleep: Waits between attempts; may raise to give up.
            retry: Another policy for this call.
        """
        try:
            return run_with_retries(
                lambda: attempt(self.backend),
                policy=retry or self.retry,
                judge=judge,
                refresh=lambda: self.backend.refresh(),
                sleep=sleep or self._sleep,
                clock=time.monotonic,
                random=random.random,
                on_retry=lambda verdict, error, elapsed_s: self._note_retry(
                    verdict,
                    elapsed_s,
                    lambda: to_storage_error(error, operation=operation, url=self.url, key=key),
                ),
            )
        except Exception as error:
            mapped = to_storage_error(error, operation=operation, url=self.url, key=key)
            if mapped is error:
                raise
            raise mapped from error

    @property
    def backend(self) -> Backend:
        """The backend of this process."""
        if self._pid != os.getpid():
            # Also in a forked child: a lock may have been held, and sockets are the parent's.
            self._lock, self._backend, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._backend is None:
                self._backend = self._connect(self.location, self._options)
            return self._backend

    def _note_retry(self, verdict: Verdict, elapsed_s: float, describe: Callable[[], Exception]) -> None:
        now_s = time.monotonic()
        with self._lock:
            self.num_retries += 1
            self.num_refreshes += verdict is Verdict.REFRESH
            is_told = elapsed_s < _TELL_AFTER_S or now_s - self._told_s < _TELL_EVERY_S
            if not is_told:
                self._told_s = now_s
        if not is_told:
            logger.warning("no answer for %.0f s, tried again: %s", elapsed_s, describe())

    def _page(self, folder: str, token: str | None, *, recursive: bool) -> Any:
        # Retried page by page: a long listing would else hardly ever succeed as a whole.
        return self.run("list", folder, lambda b: b.list_page(folder, token, recursive=recursive))

    def _list(self, folder: str) -> Iterable[ObjectInfo]:
        token = None
        while True:
            page = self._page(folder, token, recursive=True)
            yield from page.objects
            token = page.next_token
            if token is None:
                return

    def _has_objects(self, folder: str) -> bool:
        return any(True for _ in self._list(folder))


def _rebuild(url: str, options: Mapping[str, Any], retry: RetryPolicy, connect: Connect) -> Store:
    return Store(url, options, retry=retry, connect=connect)


def _folder(prefix: str) -> str:
    folder = prefix.strip("/")
    return check_key(folder) if folder else ""


def _probing(retry: RetryPolicy) -> RetryPolicy:
    return RetryPolicy(
        budget_s=min(retry.budget_s, PROBE_BUDGET_S),
        first_delay_s=retry.first_delay_s,
        max_delay_s=retry.max_delay_s,
        max_refreshes=retry.max_refreshes,
    )


def _merged(from_url: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(given)
    for name, value in from_url.items():
        mine = merged.get(name)
        if isinstance(value, Mapping) and isinstance(mine, Mapping):
            merged[name] = _merged(value, mine)
        else:
            merged.setdefault(name, value)
    return merged
