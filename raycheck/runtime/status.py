"""What a coordinator says of itself to people: plain values, made on request."""

from __future__ import annotations

from typing import Any

from raycheck.core import protocol
from raycheck.runtime.generation import Generation
from raycheck.runtime.tuner import Tuner


def status_of(generation: Generation | None, tuner: Tuner, *, now_s: float) -> dict[str, Any]:
    """Return how a run stands. May be called from any thread: what it says may be a moment apart.

    Args:
        generation: The one that is running; None before the first.
        tuner: What is known of costs and interval.
        now_s: The coordinator's monotonic clock.
    """
    commits = generation.commits if generation else None
    plan = commits.plan if commits else None
    return {
        "generation": str(generation.id) if generation else None,
        "world_size": generation.world_size if generation else 0,
        "restored_step": generation.parent.step if generation and generation.parent else None,
        "committed_step": commits.committed_step if commits else None,
        "plan": list(plan) if plan else None,
        "failures_in_a_row": commits.failures_in_a_row if commits else 0,
        **tuner.status(),
        **(_progress(generation, commits, tuner, now_s) if generation else {}),
    }


def _progress(
    generation: Generation, commits: protocol.CommitProtocol | None, tuner: Tuner, now_s: float
) -> dict[str, Any]:
    restored = generation.parent.step if generation.parent else 0
    committed = commits.committed_step if commits else None
    safe = restored if committed is None else committed
    step = max(generation.pace.step or 0, safe)
    seen_s, committed_s, planned_s = generation.pace.step_seen_s, generation.committed_s, generation.planned_s
    interval_s = tuner.interval_s
    return {
        "phase": _phase(generation, step),
        "step": step,
        "step_age_s": None if seen_s is None else now_s - seen_s,
        "steps_per_s": generation.pace.steps_per_s(now_s),
        "safe_step": safe,
        "safe_age_s": None if committed_s is None else now_s - committed_s,
        "at_risk_steps": step - safe,
        "at_risk_s": tuner.at_risk_s,
        "next_in_s": None if interval_s is None or planned_s is None else planned_s + interval_s - now_s,
        "uploads": _uploads(generation, commits),
    }


def _phase(generation: Generation, step: int) -> str:
    commits = generation.commits
    if commits is None:
        return "restoring"
    # Read once: the deciding thread may end the attempt meanwhile.
    plan = commits.plan
    if plan is None:
        return "training"
    if commits.is_committing(plan):
        return "committing"
    if commits.is_staged(plan):
        return "uploading"
    return "copying" if step >= plan.step else "planned"


def _uploads(generation: Generation, commits: protocol.CommitProtocol | None) -> list[dict[str, Any]]:
    in_flight = {plan.id for plan in commits.plans} if commits else set()
    return [
        {
            "node": seen.node,
            "ranks": list(seen.ranks),
            "num_bytes_done": seen.num_bytes_done,
            "num_bytes": seen.num_bytes,
            "seconds": seen.seconds,
        }
        for _, seen in sorted(generation.uploads.copy().items())
        if seen.plan_id in in_flight
    ]
