"""A piece of work for another thread, which the asking thread does itself if nobody has begun it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_PATIENCE_S = 0.01


class Errand(Generic[T]):
    """Work that mostly holds no interpreter lock, and so costs the asking thread nothing beside its own.

    Args:
        work: Done once, by whichever thread comes first.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._claim = threading.Lock()
        self._has_begun, self._is_done = threading.Event(), threading.Event()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, unless another thread does."""
        if not self._claim.acquire(blocking=False):
            return
        self._has_begun.set()
        try:
            self._value = self._work()
        except BaseException as error:  # noqa: BLE001  it belongs to whoever asked
            self._error = error
        finally:
            self._is_done.set()

    def wait_for_begin(self) -> None:
        """Let the other thread begin, for 10 ms at most.

        Without this it would get no turn while this one is busy in Python.
        """
        self._has_begun.wait(_PATIENCE_S)

    def result(self) -> T:
        """Return what came of it; does the work here if it has not begun.

        Raises:
            BaseException: What the work raised.
        """
        self.run()
        self._is_done.wait()
        if self._error is not None:
            raise self._error
        return self._value
