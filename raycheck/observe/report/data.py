"""What the page's script draws and lists, as JSON.

Times are seconds since the run began. Texts are plain: the script sets them
as text, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from raycheck.core.telemetry import Event
from raycheck.core.time_spent import GenerationAccount, RunAccount
from raycheck.observe.report.texts import ending_text, event_text, generation_text, plural, shortened

MAX_EVENTS = 20_000
"""In the table; of a longer run the common kinds are thinned out, the newest kept."""

_COMMON = frozenset({"checkpoint", "interval", "progress"})
_MAX_ATTEMPTS = 40_000


def script_json(value: Any) -> Markup:
    """Return JSON that no HTML parser reads as markup, whatever texts are in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def page_data(account: RunAccount, events: Sequence[Event]) -> dict[str, Any]:
    """Return the timeline's and the table's data."""
    begin_unix_s = account.begin_unix_s
    shown = shown_events(events)
    kinds = sorted({event.kind for event in shown})
    generations = [str(generation.start.generation) for generation in account.generations]
    numbers = {name: index for index, name in enumerate(generations)}
    kind_numbers = {kind: index for index, kind in enumerate(kinds)}
    attempts = [attempt for generation in account.generations for attempt in generation.attempts]
    return {
        "begin": begin_unix_s,
        "length": max(account.end_unix_s - begin_unix_s, 1e-3),
        "kinds": kinds,
        "generations": [
            [generation_text(str(g.start.generation)), g.start.world_size or 0] for g in account.generations
        ],
        "phases": [
            [
                _since(span.begin_unix_s, begin_unix_s),
                _since(span.end_unix_s, begin_unix_s),
                span.phase,
                index,
            ]
            for index, generation in enumerate(account.generations)
            for span in generation.spans
        ],
        "attempts": [
            [
                _since(attempt.began_unix_s, begin_unix_s),
                _since(attempt.staged_unix_s, begin_unix_s),
                _since(attempt.ended_unix_s, begin_unix_s),
                int(attempt.is_committed),
                attempt.step,
                *([] if attempt.is_committed else [shortened(attempt.reason)]),
            ]
            for attempt in sorted(attempts[-_MAX_ATTEMPTS:], key=lambda attempt: attempt.ended_unix_s)
        ],
        "marks": sorted(_marks(account, events)),
        "events": [
            [
                _since(event.unix_s, begin_unix_s),
                kind_numbers[event.kind],
                numbers.get(event.generation, -1),
                -1 if (step := event.count("step")) is None else step,
                event_text(event),
            ]
            for event in shown
        ],
    }


def shown_events(events: Sequence[Event]) -> list[Event]:
    """Return the events for the table, in their order: all, or all of rare kinds and the newest others."""
    room = MAX_EVENTS - sum(event.kind not in _COMMON for event in events)
    common = [index for index, event in enumerate(events) if event.kind in _COMMON]
    left_out = set(common[: max(len(common) - max(room, 0), 0)])
    return [event for index, event in enumerate(events) if index not in left_out][-MAX_EVENTS:]


def _marks(account: RunAccount, events: Iterable[Event]) -> Iterable[tuple[float, str, str]]:
    """Yield what happened to the job: when, of which sort, and in words."""
    begin_unix_s = account.begin_unix_s
    for generation, following in zip(account.generations, [*account.generations[1:], None], strict=True):
        yield from _ending_marks(generation, following, begin_unix_s)
    for event in events:
        if event.kind in ("rejected", "notice") or (event.kind == "restored" and event.facts.get("parent")):
            step = event.count("step")
            at = f"step {step:,}: " if step is not None else ""
            yield _since(event.unix_s, begin_unix_s), event.kind, f"{event.kind} {at}{event_text(event)}"


def _ending_marks(
    generation: GenerationAccount, following: GenerationAccount | None, begin_unix_s: float
) -> Iterable[tuple[float, str, str]]:
    if generation.ending == "open":
        return
    name = generation_text(str(generation.start.generation))
    alive = [span.end_unix_s for span in generation.spans if span.phase in ("start", "training", "again")]
    at_s = _since(max(alive, default=generation.spans[0].end_unix_s), begin_unix_s)
    sizes = [g.start.world_size for g in (generation, following) if g is not None]
    if len(sizes) == 2 and None not in sizes and sizes[0] != sizes[1]:
        resized = f", {plural(sizes[0] or 0, 'worker')} before, {sizes[1]:,} after"
    else:
        resized = ""
    sort = "failure" if generation.ending in ("failure", "restart") else generation.ending
    yield at_s, sort, f"{name} {ending_text(generation)}{resized}"


def _since(unix_s: float, begin_unix_s: float) -> float:
    return round(max(unix_s - begin_unix_s, 0.0), 3)
