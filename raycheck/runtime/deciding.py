"""The one thread in which a coordinator decides."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger("raycheck")

_T = TypeVar("_T")


class Decider:
    """Calls functions one after the other, and a tick now and then. Every method is thread-safe.

    Args:
        tick: Called about every ``tick_s``, however much there is to do.
        tick_s: Seconds.
        clock: Monotonic seconds.
    """

    def __init__(self, tick: Callable[[], None], *, tick_s: float, clock: Callable[[], float]) -> None:
        self._tick = tick
        self._tick_s = tick_s
        self._clock = clock
        self._changed = threading.Condition()
        self.inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        """What is to be called; None ends the thread."""

        self.thread = threading.Thread(target=self._run, name="raycheck-coordinator", daemon=True)

    def start(self) -> None:
        """Begin."""
        self.thread.start()

    def close(self) -> None:
        """Call what is waiting, and end. Blocks for that."""
        self.inbox.put(None)
        self.thread.join()

    def call(self, function: Callable[[], _T]) -> _T:
        """Return what a function returns in that thread; raise what it raises. Not from that thread itself."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001  it is the caller's
                done.set_exception(error)

        self.inbox.put(run)
        return done.result()

    def wait_while(self, condition: Callable[[], bool], deadline_s: float) -> None:
        """Block while a condition holds, until the deadline; it is looked at after each call."""
        with self._changed:
            while condition() and self._clock() < deadline_s:
                self._changed.wait(self._tick_s)

    def _run(self) -> None:
        ticked_s = self._clock()
        while True:
            with contextlib.suppress(queue.Empty):
                function = self.inbox.get(timeout=self._tick_s)
                if function is None:
                    return
                self._try(function)
            # Also where there is always something in the inbox, as while ranks tell of their steps.
            if self._clock() - ticked_s >= self._tick_s:
                ticked_s = self._clock()
                self._try(self._tick)
            with self._changed:
                self._changed.notify_all()

    def _try(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception:
            # A fault of ours must not end the run: training goes on, and the next event is tried.
            logger.exception("the coordinator failed on an event and goes on")
