"""How long to train between two checkpoints: cost bound and failure risk together.

A checkpoint costs ``c = s + d·p`` seconds of training: the stall ``s``, and the
share ``d`` of the persist time ``p`` by which steps are slower meanwhile. A job
of N GPUs fails every ``M = G / N`` seconds on average. With exponential
failures and restarts of ``R`` seconds, the share of wall time that ends up as
lasting progress, at ``tau`` seconds of training between snapshots, is

    ETTR(tau) = tau · exp(-(p + R) / M) / (M · (exp((tau + c) / M) - 1))

and is highest at ``M · (1 + W0(-exp(-1 - c / M)))``, the exact form of Young's
``sqrt(2cM)`` (Young 1974; Daly 2006, whose second-order terms it agrees with).
More often than that costs more than it saves, so the budget is a bound and not
a target: the interval is the longest of the best one, ``c / b`` (the bound of
CheckFreq, Mohan et al., FAST 2021) and what uploads need, cut by the recovery
point.

Intervals are seconds of training: a snapshot starts every ``tau + c`` seconds
of wall time, `Decision.period_s`.
"""

from __future__ import annotations

import math

from raycheck.core import interval_text
from raycheck.core.decision import (
    DAY_S,
    Constraint,
    Costs,
    Decision,
    Failures,
    Limits,
    LossSplit,
    Term,
)
from raycheck.core.efficiency import best_interval_s, ettr, overhead, times
from raycheck.errors import ConfigError

__all__ = [
    "DAY_S",
    "Constraint",
    "Costs",
    "Decision",
    "Failures",
    "Limits",
    "LossSplit",
    "Term",
    "best_interval_s",
    "choose_interval",
    "ettr",
    "feasible_interval_s",
    "overhead",
    "split_loss",
]

_HYSTERESIS = (0.8, 1.25)
_FREE_STEPS = 8
_FREE_SHARE = 0.1
_MAX_STEPS = 2**40 - 1
"""What the control page can hold."""


# The choice.


def feasible_interval_s(costs: Costs, *, max_in_flight: int = 1) -> float:
    """Return the shortest interval that uploads can follow, seconds.

    The period covers a slow upload and, on top, a tenth of it or eight steps,
    whichever is longer, so that undisturbed steps remain to be measured.
    """
    slow_s = costs.slow_persist_s
    if slow_s == math.inf or costs.step_s == math.inf:
        return math.inf
    period_s = (slow_s + max(_FREE_SHARE * slow_s, _FREE_STEPS * costs.step_s)) / max_in_flight
    return max(period_s - costs.checkpoint_s, 0.0)


def choose_interval(
    costs: Costs, failures: Failures | None, limits: Limits, *, previous: Decision | None = None
) -> Decision:
    """Return the interval to use from now on.

    Pure. The interval is the best one for the expected failures, raised to what
    the overhead bound, uploads, one step and ``min_interval_s`` ask for, then
    cut to what the recovery point and ``max_interval_s`` allow. What uploads
    and steps ask for always holds; if the rest cannot, ``on_conflict`` says
    what gives way, and the reason says what that costs.

    Args:
        costs: As measured.
        failures: None switches the risk side off: CheckFreq's rule remains.
        limits: What the user allows.
        previous: The decision in force. While risk decides, its interval stays
            as long as it is within a factor 0.8 to 1.25 of the best one, which
            costs at most 3 % of the loss; limits act at once. The reason tells
            what changed since.

    Raises:
        ConfigError: If ``on_conflict="error"``, the limits conflict and there
            is no previous decision. Later in a run the bound is kept instead:
            a run is refused at its start or not at all.
    """
    floors = _floors(costs, limits)
    ceilings = _ceilings(costs, limits)
    best_s = None
    if failures is not None:
        best_s = best_interval_s(costs.checkpoint_s, failures.mttf_s)
    if limits.interval_steps is not None:
        term: Term = "fixed"
        steps = limits.interval_steps
        chosen_s = times(float(steps), costs.step_s)
        remark = interval_text.skipped_text(costs) if chosen_s < floors[0][1] else ""
    else:
        low, high, remark = _allowed(costs, limits, floors, ceilings, is_start=previous is None)
        term, chosen_s = _pick(best_s, low, high, previous)
        steps = _whole_steps(chosen_s, costs.step_s, low[1], high[1])
    return Decision(
        interval_s=chosen_s,
        interval_steps=steps,
        decided_by=term,
        overhead=overhead(chosen_s, costs.checkpoint_s),
        ettr=None if failures is None else _ettr(chosen_s, costs, failures),
        best_interval_s=best_s,
        best_ettr=None if failures is None or best_s is None else _ettr(best_s, costs, failures),
        constraints=_binding(costs, failures, best_s, floors, ceilings),
        reason=interval_text.reason(term, chosen_s, costs, failures, limits, previous) + remark,
        costs=costs,
        failures=failures,
        limits=limits,
    )


_Bound = tuple[Term, float]


def _floors(costs: Costs, limits: Limits) -> list[_Bound]:
    """Lower bounds. The first two hold whatever the user asks for."""
    cost_s = costs.checkpoint_s
    floors: list[_Bound] = [
        ("feasibility", feasible_interval_s(costs, max_in_flight=limits.max_in_flight)),
        ("one_step", costs.step_s),
        ("overhead_bound", cost_s / limits.max_overhead if cost_s < math.inf else math.inf),
    ]
    if limits.min_interval_s is not None:
        floors.append(("min_interval", _training_s(limits.min_interval_s, costs)))
    return floors


def _ceilings(costs: Costs, limits: Limits) -> list[_Bound]:
    ceilings: list[_Bound] = []
    if limits.recovery_point_s is not None:
        # A failure just before the next checkpoint is durable loses a period and a persist.
        slow_s = costs.slow_persist_s
        room_s = 0.0 if slow_s == math.inf else max(limits.recovery_point_s - slow_s, 0.0)
        ceilings.append(("recovery_point", _training_s(room_s, costs)))
    if limits.max_interval_s is not None:
        ceilings.append(("max_interval", _training_s(limits.max_interval_s, costs)))
    return ceilings


def _training_s(period_s: float, costs: Costs) -> float:
    """What a period of wall time leaves for training."""
    return 0.0 if costs.checkpoint_s == math.inf else max(period_s - costs.checkpoint_s, 0.0)


def _highest(bounds: list[_Bound]) -> _Bound:
    return max(bounds, key=lambda bound: bound[1])


def _allowed(
    costs: Costs, limits: Limits, floors: list[_Bound], ceilings: list[_Bound], *, is_start: bool
) -> tuple[_Bound, _Bound, str]:
    """Return the lower and the upper bound to keep, and what to say about a conflict."""
    low = _highest(floors)
    if not ceilings:
        return low, ("max_interval", math.inf), ""
    high = min(ceilings, key=lambda bound: bound[1])
    if low[1] <= high[1]:
        return low, high, ""
    hard = _highest(floors[:2])
    must = max(hard, high, key=lambda bound: bound[1])
    text = interval_text.conflict_text(costs, limits, low, must, high)
    if limits.on_conflict == "error" and is_start:
        setting, value = interval_text.setting_of(high[0], limits)
        raise ConfigError(
            f"{setting}={value} cannot be kept: {interval_text.demand(low[0], costs, limits)}{text}; "
            f'change one of them, or say with on_conflict="bound" or "recovery_point" which gives way',
            field=setting,
            value=value,
        )
    if limits.on_conflict == "recovery_point":
        return must, must, text
    return low, low, text


def _pick(best_s: float | None, low: _Bound, high: _Bound, previous: Decision | None) -> tuple[Term, float]:
    if best_s is None or best_s < low[1]:
        return low
    if best_s > high[1]:
        return high
    if previous is not None and previous.decided_by != "fixed":
        least, most = _HYSTERESIS
        is_near = least * best_s <= previous.interval_s <= most * best_s
        if is_near and low[1] <= previous.interval_s <= high[1]:
            return "risk", previous.interval_s
    return "risk", best_s


def _whole_steps(interval_s: float, step_s: float, low_s: float, high_s: float) -> int:
    """Round to steps without leaving the allowed range; up, if no whole number lies in it."""
    if step_s == math.inf:
        return 1
    if interval_s == math.inf or step_s == 0.0 or interval_s / step_s > _MAX_STEPS:
        return _MAX_STEPS
    steps = round(interval_s / step_s)
    if steps * step_s > high_s * (1 + 1e-9):
        steps = math.floor(high_s / step_s * (1 + 1e-9))
    if steps * step_s < low_s * (1 - 1e-9):
        steps = math.ceil(low_s / step_s * (1 - 1e-9))
    return min(max(steps, 1), _MAX_STEPS)


def _binding(
    costs: Costs,
    failures: Failures | None,
    best_s: float | None,
    floors: list[_Bound],
    ceilings: list[_Bound],
) -> tuple[Constraint, ...]:
    if failures is None or best_s is None:
        return ()
    best = _ettr(best_s, costs, failures)
    broken = [bound for bound in floors if bound[1] > best_s]
    broken += [bound for bound in ceilings if bound[1] < best_s]
    found = [
        Constraint(term=term, interval_s=at_s, loss=max(best - _ettr(at_s, costs, failures), 0.0))
        for term, at_s in broken
    ]
    return tuple(sorted(found, key=lambda constraint: -constraint.loss))


def split_loss(interval_s: float, costs: Costs, failures: Failures) -> LossSplit:
    """Return where the time goes at this interval; the parts add up to 1 - ETTR."""
    efficiency = _ettr(interval_s, costs, failures)
    per_training_s = efficiency / interval_s if interval_s > 0 else 0.0
    stall = min(times(costs.stall_s, per_training_s), 1 - efficiency)
    slowdown = times(times(costs.slowdown, costs.persist_s), per_training_s)
    slowdown = min(slowdown, 1 - efficiency - stall)
    failures_per_s = math.inf if failures.mttf_s == 0 else 1 / failures.mttf_s
    restarting = -math.expm1(-times(costs.restart_s, failures_per_s))
    left = max(1 - efficiency - stall - slowdown, 0.0)
    restart = min(restarting, left)
    return LossSplit(stall=stall, slowdown=slowdown, recompute=left - restart, restart=restart)


def _ettr(interval_s: float, costs: Costs, failures: Failures) -> float:
    return ettr(
        interval_s,
        checkpoint_s=costs.checkpoint_s,
        persist_s=costs.persist_s,
        restart_s=costs.restart_s,
        mttf_s=failures.mttf_s,
    )
