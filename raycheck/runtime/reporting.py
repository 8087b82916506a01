"""What people, the report and metrics get to hear of checkpoints. Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

from raycheck.core import protocol
from raycheck.observe.events import EventLog
from raycheck.observe.metrics_names import (
    ATTEMPTS_FAILED,
    BYTES_STORED,
    CHECKPOINTS,
    PERSIST,
    RESTORE,
    RESTORES,
    STALL,
    Metric,
)
from raycheck.runtime import messages
from raycheck.runtime.generation import Generation
from raycheck.runtime.tuner import Tuner

logger = logging.getLogger("raycheck")


class Measure(Protocol):
    """Takes a number for a metric. Must not block or raise."""

    def __call__(self, metric: Metric, value: float, **tags: str) -> None:
        """Count, set or observe it, as the metric's kind has it."""


def measure_nothing(metric: Metric, value: float, **tags: str) -> None:
    """Take a number where nobody collects any."""


class Reporter:
    """Used by the coordinator's thread. Never blocks.

    Args:
        events: Where the report finds what happened.
        tuner: What is known of costs and interval.
        measure: Where metrics go.
    """

    def __init__(self, events: EventLog, tuner: Tuner, measure: Measure = measure_nothing) -> None:
        self._events = events
        self._tuner = tuner
        self._measure = measure

    def intervals(self, generation: str) -> None:
        """Tell how the interval has changed, if it has."""
        for reason in self._tuner.take_changes():
            self._events.record("interval", generation, change=reason, **self._tuner.status())

    def restored(self, generation: Generation, parent_accounts: dict[str, Any]) -> None:
        """Tell what all ranks have restored, and how."""
        ref = generation.parent
        facts = _restore_facts(generation.loads.values()) if ref else {}
        self._events.record(
            "restored",
            str(generation.id),
            step=ref.step if ref else 0,
            parent=[ref.step, str(ref.generation), ref.plan_id] if ref else None,
            parent_accounts=parent_accounts,
            **facts,
        )
        if facts:
            self._measure(RESTORES, 1, source=facts["source"])
            if facts["seconds"] is not None:
                self._measure(RESTORE, facts["seconds"], source=facts["source"])

    def resumed(self, generation: str, *, step: int, last_step: int, restart_s: float) -> None:
        """Tell of the first step after a restart, and of the last one before it."""
        self._events.record("resumed", generation, step=step, last_step=last_step, restart_s=restart_s)

    def progress(self, generation: str, step: int) -> None:
        """Tell how far the training is, for those who look after the coordinator has died."""
        self._events.record("progress", generation, step=step, **self._tuner.status())

    def failed(self, generation: Generation, end: protocol.EndAttempt) -> None:
        """Tell of an attempt that came to nothing."""
        quiet = end.reason in ("superseded", "closing")
        logger.log(
            logging.DEBUG if quiet else logging.WARNING,
            "no checkpoint at step %d (%s): %s",
            end.plan.step,
            end.reason,
            end.detail,
        )
        self._events.record(
            "attempt_failed", str(generation.id), reason=end.reason, detail=end.detail, **_facts(end)
        )
        self._measure(ATTEMPTS_FAILED, 1, reason=end.reason)

    def committed(self, generation: Generation, end: protocol.EndAttempt) -> None:
        """Tell of a checkpoint and what it cost: one log line, whose ``record.raycheck`` has the same as values."""
        status = self._tuner.status()
        logger.info(
            "checkpoint of step %d: stall %.1f ms, persist %.2f s, %.1f MB, interval %s, overhead %.2f %%",
            end.plan.step,
            end.stall_s * 1e3,
            end.persist_s,
            end.num_bytes / 1e6,
            self._tuner.interval_text(),
            100 * self._tuner.overhead,
            extra={
                "raycheck": {
                    "event": "checkpoint",
                    "generation": str(generation.id),
                    "step": end.plan.step,
                    "stall_s": end.stall_s,
                    "persist_s": end.persist_s,
                    "num_bytes": end.num_bytes,
                    "interval_s": status["interval_s"],
                    "decided_by": status["decided_by"],
                    "overhead": status["overhead"],
                    "max_overhead": status["max_overhead"],
                }
            },
        )
        self._events.record(
            "checkpoint",
            str(generation.id),
            accounts=generation.accounts_of(end.plan.id),
            **_facts(end),
            **status,
        )
        self._measure(CHECKPOINTS, 1)
        self._measure(BYTES_STORED, end.num_bytes)
        self._measure(STALL, end.stall_s)
        self._measure(PERSIST, end.persist_s)


def _facts(end: protocol.EndAttempt) -> dict[str, Any]:
    return {
        "step": end.plan.step,
        "plan_id": end.plan.id,
        "stall_s": end.stall_s,
        "persist_s": end.persist_s,
        "num_bytes": end.num_bytes,
        "rank_stalls_s": end.slowest_stalls,
        "rank_persists_s": end.slowest_persists,
    }


def _restore_facts(loads: Iterable[messages.RestoreEnded]) -> dict[str, Any]:
    """Return where the bytes of all ranks came from, how many there were, and the slowest rank's seconds."""
    told = [load for load in loads if load.seconds is not None]
    from_storage = sum(load.num_bytes for load in told)
    from_memory = sum(load.num_memory_bytes for load in told)
    source = "both" if from_storage and from_memory else "memory" if from_memory else "storage"
    return {
        "source": source,
        "seconds": max((load.seconds or 0.0 for load in told), default=None),
        "num_bytes": from_storage + from_memory,
        "num_memory_bytes": from_memory,
    }
