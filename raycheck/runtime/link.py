"""The worker's end of the socket to its agent."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from raycheck.core.lineage import GenerationId
from raycheck.runtime import wire
from raycheck.state.segment import Segment

logger = logging.getLogger("raycheck")

_CONNECT_TIMEOUT_S = 60.0
_RETRY_S = 0.2

RECONNECTED = "reconnected"
"""An op that the link itself puts among the messages: a new agent has taken over."""


def adopt_segment(*, address: str, generation: GenerationId, rank: int, world_size: int) -> Segment:
    """Return a segment: that of a former worker, if this node's agent has one, else a new one.

    What a former worker left is made already, and may hold what this one is to
    restore. Blocks for the agent's answer, which takes it no work.
    """
    with contextlib.suppress(OSError, ValueError):
        connection = wire.connect(address)
        try:
            connection.send("adopt", generation=list(generation), rank=rank, world_size=world_size)
            _, fd = connection.receive()
            return Segment(fd=fd)
        finally:
            connection.close()
    return Segment()


class AgentLink:
    """Connects a worker to the agent of its node, and again when that has restarted.

    Sending never blocks on the agent's work and never raises: a message to an
    agent that is gone is dropped, and the hello to its successor says what
    counts.

    Args:
        address: Where the agent listens.
        segments: Whose descriptors go along with the hello; the first has the control page.
        generation: The worker's generation.
        rank: Its rank.
        world_size: Number of ranks.
        on_reconnect: Called by the link's thread after a new hello.

    Raises:
        ConnectionError: If there is no agent within a minute.
    """

    def __init__(
        self,
        *,
        address: str,
        segments: Sequence[Segment],
        generation: GenerationId,
        rank: int,
        world_size: int,
        on_reconnect: Callable[[], None],
    ) -> None:
        self._address = address
        self._segments = segments
        self._hello = {"generation": list(generation), "rank": rank, "world_size": world_size}
        self._on_reconnect = on_reconnect
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_closed = False
        self.has_joined = False
        self._connection = self._connect(time.monotonic() + _CONNECT_TIMEOUT_S)
        threading.Thread(target=self._receive, name="raycheck-link", daemon=True).start()

    def send(self, op: str, **fields: Any) -> None:
        """Send a message; drop it if the agent is gone."""
        with contextlib.suppress(OSError):
            self._connection.send(op, **fields)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message from the agent; None after ``timeout_s``."""
        try:
            return self._inbox.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None

    def drain(self) -> list[dict[str, Any]]:
        """Return all messages that are waiting, at once."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    @property
    def has_mail(self) -> bool:
        """Whether a message is waiting."""
        return not self._inbox.empty()

    def close(self) -> None:
        """Hang up: the agent sees that this worker is gone."""
        self._is_closed = True
        self._connection.close()

    def _hung_up(self) -> bool:
        return self._is_closed

    def _connect(self, deadline_s: float | None) -> wire.Connection:
        while True:
            try:
                connection = wire.connect(self._address)
                first, *others = self._segments
                connection.send("hello", fd=first.fd, has_joined=self.has_joined, **self._hello)
                for other in others:
                    connection.send("arena", fd=other.fd)
            except OSError as error:
                if deadline_s is not None and time.monotonic() > deadline_s:
                    raise ConnectionError(
                        f"no raycheck agent answers on this node ({self._address}): {error}"
                    ) from error
                if self._is_closed:
                    raise
                time.sleep(_RETRY_S)
            else:
                return connection

    def _receive(self) -> None:
        while not self._is_closed:
            try:
                message, _ = self._connection.receive()
            except (OSError, ValueError):
                if self._hung_up():
                    return
                logger.warning("the agent of this node is gone; waiting for its successor")
                with contextlib.suppress(OSError):
                    self._connection = self._connect(None)
                    self._on_reconnect()
                    self._inbox.put({"op": RECONNECTED})
            else:
                self._inbox.put(message)
