"""What a long transfer says while it goes on."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("raycheck")

_EVERY_S = 10.0


class Progress:
    """Counts bytes, and logs a line every ten seconds. Thread-safe.

    Args:
        what: What is going on, such as ``restoring step 1200``.
        total_bytes: How much there is to do, about.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._started_s = self._told_s = time.monotonic()
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Done so far."""

    def add(self, num_bytes: int) -> None:
        """Count more bytes."""
        with self._lock:
            self.num_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._told_s < _EVERY_S:
                return
            self._told_s = now_s
            done = min(self.num_bytes, self._total_bytes)
            rate = self.num_bytes / (now_s - self._started_s)
        logger.info(
            "%s: %.1f of %.1f GB (%.0f MB/s)", self._what, done / 1e9, self._total_bytes / 1e9, rate / 1e6
        )
