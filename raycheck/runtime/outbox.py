"""Orders that arrive in the order in which they were given."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from raycheck.runtime.messages import Order

logger = logging.getLogger("raycheck")


class Outbox:
    """Passes orders to one agent, a batch when the one before has been carried out. Thread-safe.

    Calls of an actor that has several threads overtake each other, and so do
    ones that Ray makes again. An order that is given and taken back would then
    be taken back and given.

    Args:
        send: Hands over a batch without blocking; its future is done when the
            agent has carried it out, or never will.
    """

    def __init__(self, send: Callable[[tuple[Order, ...]], Future[Any]]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._waiting: list[Order] = []
        self._is_sending = False

    def put(self, order: Order) -> None:
        """Pass an order on as soon as those before it are carried out. Does not block or raise."""
        with self._lock:
            self._waiting.append(order)
            if self._is_sending:
                return
            self._is_sending = True
        self._send_next(None)

    def _send_next(self, previous: Future[Any] | None) -> None:
        if previous is not None and (error := previous.exception()) is not None:
            # An agent that is gone for good: what it should have done went with it.
            logger.debug("orders were not carried out: %r", error)
        with self._lock:
            batch, self._waiting = tuple(self._waiting), []
            self._is_sending = bool(batch)
        if batch:
            self._send(batch).add_done_callback(self._send_next)
