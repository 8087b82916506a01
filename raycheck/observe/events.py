"""What happened in a run, kept in its store for the report."""

from __future__ import annotations

import io
import json
import logging
import secrets
import threading
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raycheck.core.layout import TELEMETRY
from raycheck.errors import StorageError
from raycheck.store.objects import Store

logger = logging.getLogger("raycheck")

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
        self._lock = threading.Lock()

    def record(self, kind: str, generation: str, **facts: Any) -> None:
        """Add one event that happened now."""
        if self._store is None:
            return
        row = {
            "unix_s": time.time(),
            "kind": kind,
            "generation": generation,
            "writer": self._writer,
            "facts": json.dumps(facts),
        }
        with self._lock:
            self._rows.append(row)

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
    """Return all events of a run, oldest first. Blocks for storage."""
    rows: list[dict[str, Any]] = []
    for info in store.list_keys(TELEMETRY):
        for row in pq.read_table(io.BytesIO(store.get(info.key))).to_pylist():
            rows.append({**row, "facts": json.loads(row["facts"])})
    return sorted(rows, key=lambda row: row["unix_s"])
