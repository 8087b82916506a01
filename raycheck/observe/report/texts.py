"""Numbers and events as a report words them."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable

from raycheck.core.interval_text import duration_text, percent, seconds_text
from raycheck.core.telemetry import Event
from raycheck.core.time_spent import GenerationAccount

NONE = "–"
"""Stands where there is no number."""

_MAX_TEXT = 400


def bytes_text(num_bytes: float | None) -> str:
    """Return a size in decimal units, with three digits."""
    if num_bytes is None:
        return NONE
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    power = min(int(math.log10(num_bytes * 1.0005) // 3), 5)
    return f"{num_bytes / 1000**power:.3g} {('kB', 'MB', 'GB', 'TB', 'PB')[power - 1]}"


def rate_text(bytes_per_s: float | None) -> str:
    """Return a rate."""
    return NONE if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"


def span_text(seconds: float | None) -> str:
    """Return a length of time in the unit that suits it."""
    if seconds is None:
        return NONE
    if 600 <= seconds < 7200:
        return f"{seconds / 60:.1f} min"
    if 7200 <= seconds < 3 * 3600:
        return f"{seconds / 3600:.1f} h"
    return duration_text(seconds)


def short_s(seconds: float | None) -> str:
    """Return a short time, such as a stall, in seconds or milliseconds."""
    return NONE if seconds is None else seconds_text(seconds)


def share_text(fraction: float | None) -> str:
    """Return a fraction as a percentage; one near the whole keeps the digits that tell it from the whole."""
    if fraction is None:
        return NONE
    if 0.99 < fraction < 1:
        # Rounded down: 99.996 % is not all.
        return f"{math.floor(fraction * 10_000) / 100:.2f} %"
    return percent(fraction)


def count_text(count: int | None) -> str:
    """Return a count with separators."""
    return NONE if count is None else f"{count:,}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def utc_text(unix_s: float) -> str:
    """Return a time of day, as UTC."""
    return datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def generation_text(generation: str) -> str:
    """Return a generation as people speak of it: by its number."""
    head = generation.partition("-")[0]
    return f"g{head[1:].lstrip('0')}" if head[1:].isdigit() else generation[:40]


def ending_text(generation: GenerationAccount) -> str:
    """Return how a generation ended."""
    if generation.ending == "failure":
        return f"failure ({', '.join(generation.failure_kinds)})"
    return {
        "resize": "resize",
        "restart": "restart, of unknown cause",
        "finished": "finished",
        "stopped": "stopped",
        "open": "running, or killed",
    }[generation.ending]


def event_text(event: Event) -> str:
    """Return an event in a sentence, 400 characters at most."""
    text = _TEXTS[event.kind](event) if event.kind in _TEXTS else _facts_text(event)
    return shortened(text)


def shortened(text: str) -> str:
    """Return a text, cut off after 400 characters."""
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def _checkpoint(event: Event) -> str:
    parts = [f"stall {short_s(event.number('stall_s'))}", f"upload {short_s(event.number('persist_s'))}"]
    return f"{bytes_text(event.number('num_bytes'))} committed, {', '.join(parts)}"


def _attempt_failed(event: Event) -> str:
    words = [event.text("reason") or "for no reason given", event.text("detail") or ""]
    return "no checkpoint: " + ": ".join(filter(None, words))


def _restored(event: Event) -> str:
    parent = event.facts.get("parent")
    if not (isinstance(parent, list) and len(parent) == 3):
        return "nothing to restore: training starts at step 0"
    parts = [f"from {generation_text(str(parent[1]))}"]
    if event.text("source"):
        parts.append(f"out of {event.text('source')}")
    if event.number("seconds") is not None:
        parts.append(f"in {short_s(event.number('seconds'))}")
    if event.number("num_bytes") is not None:
        parts.append(bytes_text(event.number("num_bytes")))
    return f"all ranks restored it, {', '.join(parts)}"


def _resumed(event: Event) -> str:
    last, restart_s = event.count("last_step"), event.number("restart_s")
    parts = ["first new step"]
    if restart_s is not None:
        parts.append(f"{span_text(restart_s)} after the last one before")
    if last is not None:
        parts.append(f"which was step {last:,}")
    return ", ".join(parts)


def _notice(event: Event) -> str:
    left_s = event.number("seconds_left")
    left = "no time was given" if left_s is None else f"{span_text(left_s)} left"
    words = [event.text("source") or "of unknown source", left, event.text("detail") or ""]
    return ", ".join(filter(None, words))


def _facts_text(event: Event) -> str:
    shown = {k: v for k, v in event.facts.items() if k not in ("accounts", "parent_accounts", "step")}
    return ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in shown.items())


_TEXTS: dict[str, Callable[[Event], str]] = {
    "checkpoint": _checkpoint,
    "attempt_failed": _attempt_failed,
    "restored": _restored,
    "resumed": _resumed,
    "notice": _notice,
    "interval": lambda event: event.text("change") or "the interval changed",
    "generation": lambda event: f"begins on {plural(event.count('world_size') or 0, 'worker')}",
    "begun": lambda event: f"claimed in {short_s(event.number('seconds'))}",
    "rejected": lambda event: f"cannot be restored, an older one is tried: {event.text('reason') or ''}",
    "swept": lambda event: (
        f"{plural(event.count('keys') or 0, 'object')} that earlier starts left were removed"
    ),
    "closed": lambda event: "the job's coordinator stopped",
}
