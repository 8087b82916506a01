"""Follows a run's telemetry as it grows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from raycheck.core.layout import TELEMETRY
from raycheck.core.telemetry import Event, events_of
from raycheck.errors import CorruptCheckpointError, ObjectNotFoundError
from raycheck.observe.events import parse_events
from raycheck.store.objects import Store

logger = logging.getLogger("raycheck")

_NUM_KEPT = 200
"""Of the newest events: enough for a view of the last generation."""


class TelemetryTail:
    """Reads what has been added since it looked last. Not thread-safe.

    Args:
        store: The run's store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[str] = set()
        self._rows: list[Mapping[str, Any]] = []

    def read(self) -> list[Event]:
        """Return the newest events, in the order of time. Blocks for storage: a listing, and what is new.

        An object that is damaged is left out with one warning.

        Raises:
            StorageError: If the store cannot be read.
        """
        for info in self._store.list_keys(TELEMETRY):
            if info.key not in self._seen:
                self._rows += self._read_object(info.key)
                self._seen.add(info.key)
        self._rows = sorted(self._rows, key=lambda row: float(row["unix_s"]))[-_NUM_KEPT:]
        return events_of(self._rows)

    def _read_object(self, key: str) -> list[dict[str, Any]]:
        try:
            return parse_events(self._store.get(key))
        except ObjectNotFoundError:
            return []
        except (ValueError, CorruptCheckpointError) as error:
            logger.warning("%s is damaged and left out: %s", key, error)
            return []
