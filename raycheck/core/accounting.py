"""Where a run's time went, from its records and events.

All generations lie on one axis of wall time. Each is cut into phases that
follow one another without a gap:

    start      from the claim until all ranks have restored
    training   from then until the step where the next generation went on
    again      from there until the last sign of life: these steps were taken
               again, or left behind
    down       until the next claim: the failure, its detection, Ray's restart
    stopped    instead of down, after the job had come to an end; counts as
               no time of the run at all

A sign of life is an event of that generation. What a checkpoint costs lies
within training and again, and is taken out of both in proportion. So the
parts of a `Losses` add up to its wall time, whatever the events were.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence

from raycheck.core.lineage import GenerationId
from raycheck.core.telemetry import Attempt, Event, Reading, attempts_of, parse_generation, readings_of
from raycheck.core.time_spent import Ending, GenerationAccount, Losses, RunAccount, Span, Start


def account(starts: Iterable[Start], events: Sequence[Event]) -> RunAccount:
    """Return where a run's time went.

    Args:
        starts: Of all generations that left a record; one that only events
            tell of is added.
        events: In the order of time.
    """
    by_generation: dict[GenerationId, list[Event]] = {}
    for event in events:
        generation = parse_generation(event.generation)
        if generation is not None:
            by_generation.setdefault(generation, []).append(event)
    known = {start.generation: start for start in starts}
    known = {g: known.get(g) or Start(generation=g) for g in sorted({*known, *by_generation})}
    traces = [_Trace(start, by_generation.get(g, [])) for g, start in known.items()]
    _clip(traces)
    left_at = _left_at(known)
    costs = _costs(readings_of(events))
    generations: list[GenerationAccount] = []
    for trace, following in itertools.zip_longest(traces, traces[1:]):
        before = generations[-1].ending if generations else None
        is_first = before in (None, "finished", "stopped")
        generations.append(_account(trace, following, left_at, costs, is_first=is_first))
    overhead, bound = _overhead(readings_of(events))
    return RunAccount(
        generations=tuple(generations),
        losses=sum((g.losses for g in generations), Losses()),
        overhead=overhead,
        max_overhead=bound,
    )


class _Trace:
    """Points in time of one generation, as far as its events tell."""

    def __init__(self, start: Start, events: Sequence[Event]) -> None:
        self.start = start
        self.events = events
        self.attempts = attempts_of(events)
        times = [event.unix_s for event in events]
        begun = [e.unix_s - (e.number("seconds") or 0.0) for e in events if e.kind == "begun"]
        claimed = [] if start.claimed_unix_s is None else [start.claimed_unix_s]
        self.is_known = bool(times or claimed)
        self.begin_s = min([*begun, *claimed, *times], default=0.0)
        self.alive_until_s = max([self.begin_s, *times])
        self.training_from_s = self._training_from_s()
        self.end_s = self.alive_until_s
        """Where the next one begins."""

    def _training_from_s(self) -> float:
        for kind in ("resumed", "restored"):
            found = [event.unix_s for event in self.events if event.kind == kind]
            if found:
                return found[0]
        # Without a word of the restore: a checkpoint proves that it trained, a claim alone does not.
        return self.begin_s if self.attempts else self.alive_until_s

    @property
    def is_closed(self) -> bool:
        return any(event.kind == "closed" for event in self.events)

    def told(self, kind: str, fact: str) -> float | None:
        """Return a fact of the first event of a kind."""
        return next((event.number(fact) for event in self.events if event.kind == kind), None)

    def points(self, restored_step: int) -> list[tuple[int, float]]:
        """Return steps, rising, and when they were taken; only of times in which it trained."""
        found = [(restored_step, self.training_from_s)]
        found += [(a.step, a.began_unix_s) for a in self.attempts if a.is_committed or a.stall_s > 0]
        for event in self.events:
            step = event.count("step") if event.kind == "progress" else None
            if step is not None:
                found.append((step, event.unix_s))
        return sorted((step, min(max(s, self.training_from_s), self.alive_until_s)) for step, s in found)


def _clip(traces: list[_Trace]) -> None:
    """Put generations one after the other: a writer that was cut off may have spoken later than its successor."""
    latest_s = 0.0
    for trace in traces:
        if not trace.is_known:
            trace.begin_s = trace.training_from_s = trace.alive_until_s = trace.end_s = latest_s
        trace.begin_s = max(trace.begin_s, latest_s)
        latest_s = trace.begin_s
    for trace, following in itertools.zip_longest(traces, traces[1:]):
        alive_until_s = trace.alive_until_s
        if following is not None:
            trace.end_s = following.begin_s
            # The first step after a failure knows when the last one before it was.
            restart_s, resumed_s = following.told("resumed", "restart_s"), following.training_from_s
            if restart_s is not None:
                alive_until_s = max(alive_until_s, resumed_s - restart_s)
        trace.alive_until_s = min(max(alive_until_s, trace.begin_s), max(trace.end_s, trace.begin_s))
        trace.end_s = max(trace.end_s, trace.alive_until_s)
        trace.training_from_s = min(max(trace.training_from_s, trace.begin_s), trace.alive_until_s)


def _left_at(starts: Mapping[GenerationId, Start]) -> dict[GenerationId, int | None]:
    """Return per generation that counts the step where the next went on; None for the newest: all counts."""
    tip = max((start for start in starts.values() if start.has_record), default=None, key=_generation_of)
    found: dict[GenerationId, int | None] = {}
    if tip is not None:
        found[tip.generation] = None
    while tip is not None and tip.parent is not None:
        step, generation = tip.parent
        if generation in found or generation >= tip.generation:
            break
        found[generation] = step
        tip = starts.get(generation)
    return found


def _generation_of(start: Start) -> GenerationId:
    return start.generation


def _account(
    trace: _Trace,
    following: _Trace | None,
    left_at: Mapping[GenerationId, int | None],
    costs: Mapping[str, float],
    *,
    is_first: bool,
) -> GenerationAccount:
    start = trace.start
    restored_step = start.parent[0] if start.parent else 0
    points = trace.points(restored_step)
    last_step = None if following is None else following.told("resumed", "last_step")
    reached_step = max(points[-1][0], int(last_step or 0))
    is_exact = last_step is not None or start.has_ended or any(e.kind == "progress" for e in trace.events)
    counts = start.generation in left_at
    left = left_at.get(start.generation)
    if not counts:
        cut_s = trace.training_from_s
    elif left is None:
        cut_s = trace.alive_until_s
    else:
        points.append((max(reached_step, points[-1][0] + 1), trace.alive_until_s))
        cut_s = _time_of_step(left, points, trace.attempts)
    ending, kinds = _ending(trace, following)
    spans = _spans(trace, min(max(cut_s, trace.training_from_s), trace.alive_until_s), ending)
    cost_s = costs.get(str(start.generation), 0.0)
    return GenerationAccount(
        start=start,
        spans=tuple(span for span in spans if span.length_s > 0) or spans[:1],
        restored_step=restored_step,
        reached_step=reached_step,
        is_reached_exact=is_exact,
        left_at_step=(reached_step if left is None else left) if counts else None,
        ending=ending,
        failure_kinds=kinds,
        attempts=tuple(trace.attempts),
        losses=_losses(spans, trace.attempts, cost_s, is_first=is_first),
    )


def _time_of_step(step: int, points: Sequence[tuple[int, float]], attempts: Sequence[Attempt]) -> float:
    """Return when a step was taken: as its checkpoint tells, else on a line between the nearest that tell."""
    for attempt in attempts:
        if attempt.step == step and attempt.is_committed:
            return attempt.began_unix_s
    index = bisect.bisect_left(points, step, key=lambda point: point[0])
    if index == 0 or index == len(points) or points[index][0] == step:
        return points[min(index, len(points) - 1)][1]
    (low, low_s), (high, high_s) = points[index - 1], points[index]
    return low_s + (high_s - low_s) * (step - low) / (high - low)


def _ending(trace: _Trace, following: _Trace | None) -> tuple[Ending, tuple[str, ...]]:
    if trace.start.has_ended:
        return "finished", ()
    if trace.is_closed:
        return "stopped", ()
    if following is None:
        return "open", ()
    before, after = trace.start.failures, following.start.failures
    if before is None or after is None:
        return "restart", ()
    kinds = tuple(kind for kind in sorted(after) if after[kind] > before.get(kind, 0))
    if kinds:
        return "failure", kinds
    return ("restart" if trace.start.world_size == following.start.world_size else "resize"), ()


def _spans(trace: _Trace, cut_s: float, ending: Ending) -> tuple[Span, ...]:
    return (
        Span(trace.begin_s, trace.training_from_s, "start"),
        Span(trace.training_from_s, cut_s, "training"),
        Span(cut_s, trace.alive_until_s, "again"),
        Span(trace.alive_until_s, trace.end_s, "stopped" if ending in ("finished", "stopped") else "down"),
    )


def _losses(spans: Sequence[Span], attempts: Sequence[Attempt], cost_s: float, *, is_first: bool) -> Losses:
    start_s, training_s, again_s, after_s = (span.length_s for span in spans)
    down_s = after_s if spans[-1].phase == "down" else 0.0
    trained_s = training_s + again_s
    stall_s = min(sum(attempt.stall_s for attempt in attempts), trained_s)
    slowdown_s = min(max(cost_s - stall_s, 0.0), trained_s - stall_s)
    rest = 1.0 - (stall_s + slowdown_s) / trained_s if trained_s > 0 else 0.0
    return Losses(
        productive_s=training_s * rest,
        stall_s=stall_s,
        slowdown_s=slowdown_s,
        recompute_s=again_s * rest,
        restart_s=down_s + (0.0 if is_first else start_s),
        start_s=start_s if is_first else 0.0,
    )


def _costs(readings: Sequence[Reading]) -> dict[str, float]:
    """Return what checkpoints cost in each generation, from measures that add up over a writer's life."""
    last: dict[str, float] = {}
    costs: dict[str, float] = {}
    for reading in readings:
        if reading.cost_s is not None:
            more_s = reading.cost_s - last.get(reading.writer, 0.0)
            # A correction of what an earlier generation was charged may make it less than nothing.
            costs[reading.generation] = costs.get(reading.generation, 0.0) + more_s
            last[reading.writer] = reading.cost_s
    return {generation: max(cost_s, 0.0) for generation, cost_s in costs.items()}


def _overhead(readings: Sequence[Reading]) -> tuple[float | None, float | None]:
    """Return the overhead over all writers, and the newest bound."""
    newest = {r.writer: r for r in readings if r.cost_s is not None and r.inside_steps_s is not None}
    inside_s = sum(reading.inside_steps_s or 0.0 for reading in newest.values())
    cost_s = sum(max(reading.cost_s or 0.0, 0.0) for reading in newest.values())
    bounds = [reading.max_overhead for reading in readings if reading.max_overhead is not None]
    return (cost_s / inside_s if inside_s > 0 else None), (bounds[-1] if bounds else None)
