"""What a decision says to people, in one sentence."""

from __future__ import annotations

import math

from raycheck.core.decision import DAY_S, Costs, Decision, Failures, Limits, Term
from raycheck.core.efficiency import overhead

Bound = tuple[Term, float]


def duration_text(seconds: float) -> str:
    """Return a duration as people write it: ``412 s``, ``29.3 h``, ``3.7 days``."""
    if seconds == math.inf:
        return "forever"
    if seconds >= 3 * DAY_S:
        return f"{seconds / DAY_S:,.1f} days"
    if seconds >= 3 * 3600:
        return f"{seconds / 3600:.1f} h"
    return seconds_text(seconds)


def seconds_text(seconds: float) -> str:
    """Return a duration in seconds, or in milliseconds when it is short."""
    if seconds == math.inf:
        return "forever"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 0.1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


def percent(fraction: float) -> str:
    """Return a fraction as a percentage with three digits."""
    return f"{fraction * 100:.3g} %"


def reason(
    term: Term,
    interval_s: float,
    costs: Costs,
    failures: Failures | None,
    limits: Limits,
    previous: Decision | None,
) -> str:
    """Return why the interval is what it is, and what has changed since the previous decision."""
    now = seconds_text(interval_s)
    if term == "fixed":
        return f"interval {now}: {_steps_text(limits.interval_steps)}"
    cause = why(term, costs, failures, limits)
    if previous is None:
        return f"interval {now}: {cause}"
    before = seconds_text(previous.interval_s)
    if before == now:
        return f"interval {now} kept: {cause}"
    changes = _changes(previous, costs, failures, limits)
    return f"interval {before} -> {now}: {', '.join([*changes, cause])}"


def why(term: Term, costs: Costs, failures: Failures | None, limits: Limits) -> str:
    """Return what the deciding term asks for."""
    cost = seconds_text(costs.checkpoint_s)
    if term == "risk" and failures is not None:
        return f"expected time to failure {duration_text(failures.mttf_s)}, a checkpoint costs {cost}"
    if term == "overhead_bound":
        return f"a checkpoint costs {cost} and may take {percent(limits.max_overhead)} of training"
    if term == "feasibility":
        return f"an upload takes up to {seconds_text(costs.slow_persist_s)} and the next must wait for it"
    if term == "recovery_point":
        return f"at most {seconds_text(limits.recovery_point_s or 0.0)} of training may be lost"
    if term == "one_step":
        return f"one step takes {seconds_text(costs.step_s)}"
    if term == "fixed":
        return _steps_text(limits.interval_steps)
    setting, value = setting_of(term, limits)
    return f"{setting} is {value}"


def _steps_text(interval_steps: int | None) -> str:
    return f"every {'step' if interval_steps == 1 else f'{interval_steps:,} steps'}, as interval_steps says"


def _changes(previous: Decision, costs: Costs, failures: Failures | None, limits: Limits) -> list[str]:
    """What moved most since the previous decision: at most two, the largest change first."""
    old = previous.costs
    slower, slow = percent(costs.slowdown), percent(old.slowdown)
    rows = [
        (costs.step_s, old.step_s, f"step time {_new_old(costs.step_s, old.step_s)}"),
        (costs.stall_s, old.stall_s, f"stall {_new_old(costs.stall_s, old.stall_s)}"),
        (costs.persist_s, old.persist_s, f"upload {_new_old(costs.persist_s, old.persist_s)}"),
        (costs.slowdown, old.slowdown, f"steps slower by {slower} instead of {slow} during uploads"),
        (
            limits.max_overhead,
            previous.limits.max_overhead,
            f"bound {percent(limits.max_overhead)} instead of {percent(previous.limits.max_overhead)}",
        ),
    ]
    if failures is not None and previous.failures is not None:
        new_rate, old_rate = failures.gpu_days_per_failure, previous.failures.gpu_days_per_failure
        rows += [
            (
                failures.num_gpus,
                previous.failures.num_gpus,
                f"{failures.num_gpus:,} GPUs instead of {previous.failures.num_gpus:,}",
            ),
            (new_rate, old_rate, f"a failure every {new_rate:,.3g} GPU-days instead of {old_rate:,.3g}"),
        ]
    moved = [(_log_ratio(new, before), text) for new, before, text in rows]
    moved = sorted((row for row in moved if row[0] > math.log(1.1)), key=lambda row: -row[0])
    return [text for _, text in moved[:2]]


def _new_old(new_s: float, old_s: float) -> str:
    return f"{seconds_text(new_s)} instead of {seconds_text(old_s)}"


def _log_ratio(new: float, old: float) -> float:
    if new == old:
        return 0.0
    if min(new, old) <= 0 or math.isinf(max(new, old)):
        return math.inf
    return abs(math.log(new) - math.log(old))


def conflict_text(costs: Costs, limits: Limits, low: Bound, must: Bound, high: Bound) -> str:
    """Return what a conflict costs.

    Args:
        costs: As measured.
        limits: What the user allows.
        low: The highest of the lower bounds, with the overhead bound.
        must: What holds when the ceiling is kept as far as it can be.
        high: The lowest ceiling.
    """
    setting, _ = setting_of(high[0], limits)
    cost = percent(overhead(must[1], costs.checkpoint_s))
    lost = seconds_text(low[1] + costs.checkpoint_s + costs.slow_persist_s)
    if must[0] != high[0]:
        lost = seconds_text(must[1] + costs.checkpoint_s + costs.slow_persist_s)
        return f"; {setting} cannot be kept: up to {lost} of training may be lost"
    if limits.on_conflict == "recovery_point":
        return f"; {setting} is kept at {cost} overhead, {percent(limits.max_overhead)} were allowed"
    if limits.on_conflict == "bound":
        return f"; {setting} is not kept: up to {lost} of training may be lost"
    return f"; keeping {setting} costs {cost} overhead, not keeping it loses up to {lost} of training"


def skipped_text(costs: Costs) -> str:
    """Return the remark on a fixed interval that uploads cannot follow."""
    return f"; an upload takes up to {seconds_text(costs.slow_persist_s)}, so some are skipped"


def demand(term: Term, costs: Costs, limits: Limits) -> str:
    """Return what stands against a ceiling: a setting, or a fact of the job."""
    if term == "overhead_bound":
        return f"max_overhead={limits.max_overhead}"
    if term == "min_interval":
        return f"min_interval_s={limits.min_interval_s}"
    return why(term, costs, None, limits)


def setting_of(term: Term, limits: Limits) -> tuple[str, float | None]:
    """Return the setting behind a term, and its value."""
    if term == "recovery_point":
        return "recovery_point_s", limits.recovery_point_s
    if term == "max_interval":
        return "max_interval_s", limits.max_interval_s
    return "min_interval_s", limits.min_interval_s
