"""A view of a run as lines of text: for a terminal, or one by one for a pipe. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from raycheck.core.interval_text import seconds_text
from raycheck.core.telemetry import Event
from raycheck.observe.report.texts import (
    bytes_text,
    event_text,
    generation_text,
    plural,
    share_text,
    utc_text,
)
from raycheck.observe.watch import UploadView, View, is_silent, new_events

Tone = Literal["", "title", "dim", "good", "warn", "bad"]

_LABEL_WIDTH = 12
_MAX_NODES = 8
_MAX_EVENTS = 6
_BAR_WIDTH = 20
_PROGRESS_EVERY_S = 10.0
_UNDER_WAY = {"copying": "copied", "uploading": "uploaded", "committing": "committed"}
_AGE_WIDTH = 10


class Line(NamedTuple):
    """A text beside its label."""

    label: str | None
    """None: the text has the whole width. Empty: it goes on with what stands above."""

    text: str
    tone: Tone = ""
    max_rows: int = 3
    """What is longer is cut off."""

    hang: int = 0
    """Columns by which further rows are set in."""


def screen(view: View, *, width: int) -> list[Line]:
    """Return what a terminal of this width shows, line by line; none is longer than ``width``."""
    lines = [
        *_title(view),
        *_steps(view),
        *_checkpoints(view),
        *_costs(view),
        *_uploads(view),
        *_events(view),
    ]
    return [line for each in lines for line in _fitted(each, width)]


def plain(line: Line) -> str:
    """Return a line without its tone."""
    return line.text if line.label is None else f"{line.label:<{_LABEL_WIDTH}}{line.text}".rstrip()


def changes(before: View | None, now: View, *, progress_told_unix_s: float) -> tuple[list[str], bool]:
    """Return a line for each thing that has changed, and whether one of them tells the progress.

    Args:
        before: The view before; None: this is the first.
        now: The present one.
        progress_told_unix_s: When the last line was that told the progress; there is one about every ten seconds.
    """
    stamp = _clock(now.unix_s)
    lines = [] if before else [f"{stamp}  {_title(now)[0].text}"]
    if before is not None and before.source != now.source:
        lines.append(f"{stamp}  now from its {now.source}")
    # At first only the last few: the rest is the report's.
    for event in new_events(before, now)[-_MAX_EVENTS if before is None else None :]:
        lines.append(f"{_clock(event.unix_s)}  {_event(event)}")
    if now.plan_step is not None and (before is None or before.plan_step != now.plan_step):
        lines.append(f"{stamp}  next checkpoint at step {now.plan_step:,}")
    if before is not None and now.is_over and not before.is_over:
        lines.append(f"{stamp}  the job is over")
    is_due = now.unix_s - progress_told_unix_s >= _PROGRESS_EVERY_S
    if is_due and (before is None or now.step != before.step):
        lines.append(f"{stamp}  {_progress(now)}")
        return lines, True
    return lines, False


def rough(seconds: float | None) -> str:
    """Return a time in one unit, as it is said in passing."""
    if seconds is None:
        return "?"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def _title(view: View) -> list[Line]:
    parts = [view.run]
    if view.generation:
        parts.append(generation_text(view.generation))
    if view.world_size:
        parts.append(plural(view.world_size, "rank"))
    if view.source == "coordinator":
        parts.append(view.phase or "starting")
        return [Line(None, ", ".join(parts), "title")]
    lines = [Line(None, ", ".join([*parts, "from telemetry alone"]), "title")]
    if view.is_over:
        lines.append(Line(None, "the job is over", "warn"))
    elif view.heard_age_s is None:
        lines.append(Line(None, "nothing has been told yet", "warn"))
    else:
        is_late = is_silent(view)
        what = "the job may be dead" if is_late else "what happened since is not known yet"
        tone: Tone = "bad" if is_late else "dim"
        lines.append(Line(None, f"last heard of {rough(view.heard_age_s)} ago: {what}", tone))
    return lines


def _steps(view: View) -> Iterator[Line]:
    if view.step is None:
        return
    at_least = "at least " if view.source == "telemetry" else ""
    parts = [f"{at_least}{view.step:,}", *_pace(view)]
    yield Line("step", ", ".join(parts))


def _pace(view: View) -> Iterator[str]:
    if view.steps_per_s is not None:
        yield f"{view.steps_per_s:.3g} steps/s"
    if view.step_s is not None:
        yield f"{seconds_text(view.step_s)} a step without checkpoints"


def _checkpoints(view: View) -> Iterator[Line]:
    last = view.last_checkpoint
    if view.safe_step is not None:
        age = f", committed {rough(view.safe_age_s)} ago" if view.safe_age_s is not None else ""
        yield Line("safe", f"step {view.safe_step:,}{age}" if view.safe_step else "nothing yet")
    if last is not None:
        stall_s, persist_s = last.number("stall_s"), last.number("persist_s")
        cost = f"stalled training {seconds_text(stall_s or 0.0)}, upload {seconds_text(persist_s or 0.0)}"
        yield Line("", f"{bytes_text(last.count('num_bytes'))}, {cost}")
    if view.failures_in_a_row:
        yield Line("", f"{plural(view.failures_in_a_row, 'save')} in a row failed since", "bad")
    yield Line("next", _next(view))
    if view.interval_s and view.plan_step is None and (view.next_in_s or 0.0) > 1.1 * view.interval_s:
        yield Line("", "later than the interval says, until the overhead is within its bound again", "dim")
    risk = _risk(view)
    if risk:
        yield Line("at risk", risk)


def _next(view: View) -> str:
    if view.source == "telemetry":
        return "not known from telemetry"
    step, seconds = view.next_step, view.next_snapshot_s
    if step is None:
        return "as soon as steps have been measured"
    if view.phase in _UNDER_WAY:
        return f"step {step:,} is being {_UNDER_WAY[view.phase]}"
    about = "" if view.plan_step is not None else "about "
    when = "" if seconds is None else f", in about {rough(seconds)}" if seconds >= 0.05 else ", now"
    return f"{about}step {step:,}{when}"


def _risk(view: View) -> str:
    if view.at_risk_steps is None:
        return ""
    steps = plural(view.at_risk_steps, "step")
    if view.at_risk_s is None:
        return f"at least {steps}, if the job dies now"
    return f"{rough(view.at_risk_s)} of training, {steps}, if the job dies now"


def _costs(view: View) -> Iterator[Line]:
    if view.interval_s is not None:
        yield Line("interval", f"{seconds_text(view.interval_s)}, decided by {view.decided_by or '?'}")
        if view.reason:
            yield Line("", view.reason, "dim")
    if view.overhead is not None:
        bound = "" if view.max_overhead is None else f", the bound is {share_text(view.max_overhead)}"
        is_over = view.max_overhead is not None and view.overhead > view.max_overhead
        count = "" if view.num_checkpoints is None else f", {plural(view.num_checkpoints, 'checkpoint')}"
        text = f"{share_text(view.overhead)} of training{bound}{count}"
        yield Line("overhead", text, "warn" if is_over else "good")


def _uploads(view: View) -> Iterator[Line]:
    shown = sorted(view.uploads, key=lambda upload: (_done(upload), upload.node))
    for index, upload in enumerate(shown[:_MAX_NODES]):
        yield Line("uploads" if index == 0 else "", _upload(upload))
    if len(shown) > _MAX_NODES:
        yield Line("", f"and {plural(len(shown) - _MAX_NODES, 'node')} further on", "dim")


def _done(upload: UploadView) -> float:
    return upload.num_bytes_done / upload.num_bytes if upload.num_bytes else 1.0


def _upload(upload: UploadView) -> str:
    filled = round(_done(upload) * _BAR_WIDTH)
    bar = "━" * filled + "─" * (_BAR_WIDTH - filled)
    rate = upload.num_bytes_done / upload.seconds if upload.seconds > 0 else 0.0
    amount = f"{bytes_text(upload.num_bytes_done)} of {bytes_text(upload.num_bytes)}, {bytes_text(rate)}/s"
    return f"{upload.node[:8]:<8}  {bar} {_done(upload):4.0%}  {amount}"


def _events(view: View) -> Iterator[Line]:
    for index, event in enumerate(_chosen(view.events)[::-1]):
        age = f"{rough(max(view.unix_s - event.unix_s, 0.0))} ago"
        yield Line(
            "events" if index == 0 else "",
            f"{age:>{_AGE_WIDTH}}  {_event(event)}",
            tone="dim" if index else "",
            max_rows=1 if event.kind in ("checkpoint", "interval") else 2,
            hang=_AGE_WIDTH + 2,
        )


def _chosen(events: Sequence[Event]) -> list[Event]:
    """Return the newest of each kind, as far as there is room; then the newest of all."""
    told = [event for event in events if event.kind != "progress"]
    newest = {event.kind: event for event in told}
    firsts = {id(event) for event in newest.values()}
    ranked = sorted(told[::-1], key=lambda event: id(event) not in firsts)[:_MAX_EVENTS]
    return sorted(ranked, key=lambda event: event.unix_s)


def _event(event: Event) -> str:
    step = event.count("step")
    at = "" if step is None else f" step {step:,}"
    if event.kind == "progress":
        return f"progress{at}"
    if event.kind == "interval":
        return event_text(event)
    return f"{event.kind.replace('_', ' ')}{at}: {event_text(event)}"


def _progress(view: View) -> str:
    parts = ["" if view.step is None else f"step {view.step:,}"]
    if view.steps_per_s is not None:
        parts.append(f"{view.steps_per_s:.3g} steps/s")
    if view.overhead is not None:
        parts.append(f"overhead {share_text(view.overhead)}")
    if _risk(view):
        parts.append(f"at risk {_risk(view)}")
    return ", ".join(filter(None, parts))


def _clock(unix_s: float) -> str:
    return utc_text(unix_s).split()[1]


def _fitted(line: Line, width: int) -> list[Line]:
    """Wrap a line, and cut it off after its last row."""
    room = max(width - (0 if line.label is None else _LABEL_WIDTH), 20)
    texts = textwrap.wrap(
        line.text, room, max_lines=line.max_rows, placeholder=" …", subsequent_indent=" " * line.hang
    )
    rest = None if line.label is None else ""
    return [Line(line.label if index == 0 else rest, text, line.tone) for index, text in enumerate(texts)]
