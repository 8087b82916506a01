"""What happened in a run, kept in its store for the report."""

from __future__ import annotations

import io
import json
import logging
import math
import secrets
import threading
import time
from collections import deque
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raycheck.core.layout import TELEMETRY
from raycheck.errors import CorruptCheckpointError, StorageError
from raycheck.store.objects import Store
from raycheck.store.tables import iter_rows

logger = logging.getLogger("raycheck")

_MAX_ROWS = 100_000
"""Of one object: a flush has a few hundred."""

_NUM_RECENT = 8

_COLUMNS = ("unix_s", "kind", "generation", "writer", "facts")
_SCHEMA = pa.schema([(name, pa.float64() if name == "unix_s" else pa.string()) for name in _COLUMNS])


class EventLog:
    """Collects events and writes them as Parquet objects, one per flush.

    Thread-safe. Keys are unique to the writer; a failed write is tried again
    with the next flush and never disturbs a run.

    Args:
        store: None: events are dropped.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._writer = secrets.token_hex(4)
        self._num_flushes = 0
        self._flushed_s = time.monotonic()
        self._rows: list[dict[str, Any]] = []
        # By kind, so that the many do not push out the few.
        self._recent: dict[str, deque[dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def record(self, kind: str, generation: str, **facts: Any) -> None:
        """Add one event that happened now."""
        row = {
            "unix_s": time.time(),
            "kind": kind,
            "generation": generation,
            "writer": self._writer,
            "facts": json.dumps(facts),
        }
        with self._lock:
            self._recent.setdefault(kind, deque(maxlen=_NUM_RECENT)).append(row)
            if self._store is not None:
                self._rows.append(row)

    def recent(self) -> list[dict[str, Any]]:
        """Return the newest events as `read_events` gives them, oldest first; also where none are stored.

        At most eight of each kind, however long ago those were.
        """
        with self._lock:
            rows = [row for some in self._recent.values() for row in some]
        rows.sort(key=lambda row: float(row["unix_s"]))
        return [{**row, "facts": json.loads(row["facts"])} for row in rows]

    def flush_if_older_than(self, seconds: float) -> None:
        """Write what has been collected, unless the last flush is younger. Blocks for storage."""
        if time.monotonic() - self._flushed_s >= seconds:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected. Blocks for storage."""
        with self._lock:
            rows, self._rows = self._rows, []
            self._flushed_s = time.monotonic()
        if self._store is None or not rows:
            return
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), sink, compression="zstd")
        self._num_flushes += 1
        try:
            self._store.put(
                f"{TELEMETRY}/events-{self._writer}-{self._num_flushes:06d}.parquet", sink.getvalue()
            )
        except StorageError as error:
            logger.info("telemetry is kept for later: %s", error)
            with self._lock:
                self._rows[:0] = rows


def read_events(store: Store) -> list[dict[str, Any]]:
    """Return all events of a run, oldest first. Blocks for storage.

    An object that is damaged is left out with a warning: a report without it is
    better than none.
    """
    events: list[dict[str, Any]] = []
    for info in store.list_keys(TELEMETRY):
        try:
            events += parse_events(store.get(info.key))
        except (ValueError, CorruptCheckpointError) as error:
            logger.warning("%s is damaged and left out: %s", info.key, error)
    return sorted(events, key=lambda event: float(event["unix_s"]))


def parse_events(data: bytes) -> list[dict[str, Any]]:
    """Return the events that one object holds.

    Raises:
        ValueError: If it is damaged.
    """
    events = []
    for row in iter_rows(data, _SCHEMA, max_rows=_MAX_ROWS):
        event = dict(zip(_COLUMNS, row, strict=True))
        try:
            event["facts"] = json.loads(event["facts"])
        except (ValueError, RecursionError) as error:
            raise ValueError("facts that are no JSON") from error
        if type(event["facts"]) is not dict or not math.isfinite(event["unix_s"]):
            raise ValueError("facts that are none, or of no time")
        events.append(event)
    return events
