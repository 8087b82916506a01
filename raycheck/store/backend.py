"""What a store must do: the narrow contract behind ``Store``.

A backend makes one attempt at a time and raises whatever its library raises.
``Store`` adds retries, fresh credentials and our errors, once for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

Bytes = bytes | bytearray | memoryview


class ObjectInfo(NamedTuple):
    """An object: its key below the root, and its size."""

    key: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """One answer of a listing."""

    objects: list[ObjectInfo]
    folders: list[str] = dataclasses.field(default_factory=list)
    """Keys of what may be folders, when the listing went one level deep only."""
    next_token: str | None = None
    """Ask with it for the next page; None: this was the last."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartLimits:
    """How an object may be cut for upload."""

    min_part_bytes: int = 5 << 20
    """No part but the last may be smaller."""

    max_parts: int = 10_000
    """No object may have more parts."""

    default_part_bytes: int = 16 << 20
    """Part size while the object is small enough for it."""

    max_parallel: int = 64
    """More parts at a time than this gain nothing."""


class PartUpload(Protocol):
    """An object under way. No reader sees any of it before ``complete``."""

    def write_part(self, number: int, offset: int, data: Bytes, crc32c: int) -> None:
        """Send one part. Parts of independent uploads come from several threads in any order."""

    def complete(self) -> None:
        """Make the object visible and durable."""

    def abort(self) -> None:
        """Leave nothing behind. Called once, after the last part has returned."""


class Backend(Protocol):
    """Objects under one root. Every method may be called from several threads."""

    limits: PartLimits

    parts_are_independent: bool
    """Whether a failed part can be sent again, and parts can be sent in any order."""

    takes_views: bool
    """Whether data may be a view of memory that is not ours to keep, as a mapped file's."""

    def put(self, key: str, data: Bytes, crc32c: int) -> None:
        """Write a whole object; no reader ever sees part of it."""

    def begin_upload(self, key: str, size_bytes: int) -> PartUpload:
        """Start an object that is written in parts."""

    def get(self, key: str, most_bytes: int) -> bytes:
        """Return an object, or its first bytes if it has more than ``most_bytes``."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` on; return fewer bytes only at the end of the object."""

    def size_bytes(self, key: str) -> int:
        """Return the size, fresh from the store."""

    def list_page(self, folder: str, token: str | None, *, recursive: bool) -> Page:
        """Return objects below a folder ("" is the root), fresh from the store, without placeholders.

        Not recursive: objects directly in it, and folders, which may turn out empty.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete; an object that is not there is no error."""

    def sweep_uploads(self, older_than_s: float) -> list[str]:
        """Abort uploads under this root that began longer ago; return their keys."""

    def refresh(self) -> None:
        """Build the client anew, with credentials read again."""
