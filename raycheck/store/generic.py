"""Objects in any other file system of fsspec, with nothing but its common methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fsspec

from raycheck.errors import ConfigError
from raycheck.store.backend import Bytes, ObjectInfo, Page, PartLimits
from raycheck.store.location import Location


class FsspecBackend:
    """Objects below a root of an fsspec file system.

    Parts are streamed one after another, so a failure starts the object again.
    Whether a reader can see an object before it is whole depends on the file
    system: memory:// shows it, the clients of object stores do not.

    Args:
        location: The root.
        options: Of the file system; a ``refresh`` makes a new one from them.
        make: How a file system is made; a test passes a faulty one.
    """

    parts_are_independent = False
    takes_views = False

    def __init__(
        self, location: Location, options: Mapping[str, Any], *, make: Callable[..., Any] | None = None
    ) -> None:
        self.limits = PartLimits(min_part_bytes=1)
        self._scheme = location.scheme
        self._url = location.url
        self._options = dict(options)
        self._make = make
        self.refresh()

    def refresh(self) -> None:
        """Make a new file system from the options."""
        own = {"skip_instance_cache": True, "use_listings_cache": False}
        make = self._make or fsspec.get_filesystem_class(self._scheme)
        try:
            self._fs = make(**{**self._options, **own})
        except (TypeError, KeyError) as error:
            names = ", ".join(sorted(self._options)) or "none"
            raise ConfigError(
                f"storage_options for {self._scheme}:// are not usable (given: {names}): {error}",
                field="storage_options",
            ) from error

    def put(self, key: str, data: Bytes, crc32c: int) -> None:
        """Write a whole object."""
        path = self._path(key)
        self._make_folder(path)
        self._fs.pipe_file(path, bytes(data))

    def begin_upload(self, key: str, size_bytes: int) -> StreamUpload:
        """Start an object that is written in parts."""
        path = self._path(key)
        self._make_folder(path)
        return StreamUpload(self._fs, path)

    def get(self, key: str, most_bytes: int) -> bytes:
        """Return an object, or its first bytes."""
        data: bytes = self._fs.cat_file(self._path(key), start=0, end=most_bytes)
        return data

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` on; return fewer bytes at the end of the object."""
        data = self._fs.cat_file(self._path(key), start=offset, end=offset + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def size_bytes(self, key: str) -> int:
        """Return the size."""
        info = self._info(self._path(key))
        if info["type"] != "file":
            raise FileNotFoundError(self._path(key))
        return int(info["size"])

    def list_page(self, folder: str, token: str | None, *, recursive: bool) -> Page:
        """Return what is below a folder."""
        root = self._fs._strip_protocol(self._url)
        path = self._path(folder) if folder else root
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(path, detail=True)
        except FileNotFoundError:
            return Page([])
        objects = [
            ObjectInfo(name.removeprefix(f"{root}/"), int(info["size"]))
            for name, info in found.items()
            # ``find`` answers with the object itself when ``path`` is one.
            if info["type"] == "file" and not name.endswith("/") and name.startswith(f"{path}/")
        ]
        if recursive:
            return Page(objects)
        depth = folder.count("/") + 2 if folder else 1
        return Page(
            [each for each in objects if each.key.count("/") == depth - 1],
            sorted({"/".join(e.key.split("/")[:depth]) for e in objects if e.key.count("/") >= depth}),
        )

    def delete(self, keys: Sequence[str]) -> None:
        """Delete what is there."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                # ``rm`` would read "*" and "[" in the key as wildcards.
                self._fs.rm_file(self._path(key))

    def sweep_uploads(self, older_than_s: float) -> list[str]:
        """Return nothing: fsspec has no way to list uploads that were left over."""
        return []

    def _path(self, key: str) -> str:
        return f"{self._fs._strip_protocol(self._url)}/{key}"

    def _info(self, path: str) -> Any:
        self._fs.invalidate_cache()
        return self._fs.info(path)

    def _make_folder(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)


class StreamUpload:
    """A file that is open for writing."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._file = fs.open(path, "wb")

    def write_part(self, number: int, offset: int, data: Bytes, crc32c: int) -> None:
        """Write one part."""
        assert self._file.tell() == offset, "parts of a stream come in order"
        self._file.write(data)

    def complete(self) -> None:
        """Make the object visible and durable."""
        self._file.close()

    def abort(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(Exception):
            if hasattr(self._file, "discard"):
                self._file.discard()
        # A file that is collected while open closes itself, which would publish it.
        with contextlib.suppress(AttributeError):
            self._file.closed = True
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path)
