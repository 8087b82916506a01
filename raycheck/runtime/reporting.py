"""What people and the report get to hear of checkpoints: log lines and telemetry. Decides nothing."""

from __future__ import annotations

import logging
from typing import Any

from raycheck.core import protocol
from raycheck.core.lineage import CheckpointRef
from raycheck.observe.events import EventLog
from raycheck.runtime.generation import Generation
from raycheck.runtime.tuner import Tuner

logger = logging.getLogger("raycheck")


class Reporter:
    """Used by the coordinator's thread. Never blocks."""

    def __init__(self, events: EventLog, tuner: Tuner) -> None:
        self._events = events
        self._tuner = tuner

    def intervals(self, generation: str) -> None:
        """Tell how the interval has changed, if it has."""
        for reason in self._tuner.take_changes():
            self._events.record("interval", generation, change=reason, **self._tuner.status())

    def restored(
        self, generation: Generation, ref: CheckpointRef | None, parent_accounts: dict[str, Any]
    ) -> None:
        """Tell what all ranks have restored."""
        self._events.record(
            "restored",
            str(generation.id),
            step=ref.step if ref else 0,
            parent=[ref.step, str(ref.generation), ref.plan_id] if ref else None,
            parent_accounts=parent_accounts,
        )

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

    def committed(self, generation: Generation, end: protocol.EndAttempt) -> None:
        """Tell of a checkpoint and what it cost."""
        logger.info(
            "checkpoint of step %d: stall %.1f ms, persist %.2f s, %.1f MB, interval %s, overhead %.2f %%",
            end.plan.step,
            end.stall_s * 1e3,
            end.persist_s,
            end.num_bytes / 1e6,
            self._tuner.interval_text(),
            100 * self._tuner.overhead,
        )
        self._events.record(
            "checkpoint",
            str(generation.id),
            accounts=generation.accounts_of(end.plan.id),
            **_facts(end),
            **self._tuner.status(),
        )


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
