"""SIGTERM in a worker: a notice first, the end later."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger("raycheck")


def install_sigterm(grace_s: float, *, tell: Callable[[str, float, str], bool]) -> None:
    """Have SIGTERM end this process only after a while, in which training goes on.

    The former handler, Ray's, is called when the time is over, or at once at a
    second SIGTERM and where nobody could be told. Does nothing outside the main
    thread, which alone may set handlers, or if ``grace_s`` is 0.

    Args:
        grace_s: How long this process goes on.
        tell: Passes on source, seconds left and detail; returns whether it
            could. Called in a thread of its own: the thread that the signal
            has interrupted may hold the very lock that it needs.
    """
    if grace_s == 0:
        return
    if threading.current_thread() is not threading.main_thread():
        logger.info("SIGTERM ends this worker at once: its handler could not be set here")
        return
    previous: Any = signal.getsignal(signal.SIGTERM)
    has_come = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come:
            _end(previous, number, frame)
            return
        has_come = True
        threading.Thread(target=_go_on, args=(grace_s, tell), name="raycheck-sigterm", daemon=True).start()

    signal.signal(signal.SIGTERM, handle)


def _go_on(grace_s: float, tell: Callable[[str, float, str], bool]) -> None:
    try:
        if tell("SIGTERM", grace_s, f"process {os.getpid()} was told to end"):
            logger.warning("SIGTERM: this worker ends in %.0f s; saving", grace_s)
            time.sleep(grace_s)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _end(previous: Any, number: int, frame: FrameType | None) -> None:
    if callable(previous):
        previous(number, frame)
        return
    if previous == signal.SIG_IGN:
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
