"""Puts a report together: values into a template, everything that anyone wrote escaped."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from raycheck.core.accounting import account
from raycheck.core.telemetry import Attempt, Event, readings_of
from raycheck.core.time_spent import GenerationAccount, Losses, RunAccount
from raycheck.observe.report import texts
from raycheck.observe.report.charts import TimeCharts, histogram, rank_rows, spread
from raycheck.observe.report.data import page_data, script_json, shown_events
from raycheck.observe.report.sources import Run

_HERE = Path(__file__).parent
_SCRIPTS = ("words.js", "timeline.js", "table.js")
_MAX_ROWS = 60
"""Of changes or ranks in a table; the events' table has the rest."""

_MAX_GENERATIONS = 200

_LOSS_ROWS = (
    ("stall_s", "stall", "Training blocked by snapshots, the slowest rank each time"),
    ("slowdown_s", "slowdown", "Steps that were slower while snapshots were copied and uploaded"),
    ("recompute_s", "recompute", "Steps taken again after a failure, or left behind"),
    ("restart_s", "restart", "From the last sign of life of a generation until the next one trained"),
    ("start_s", "first start", "From a job's first claim until all ranks had started"),
)


def make_page(run: Run, *, made_unix_s: float | None = None) -> bytes:
    """Return the report as one HTML file, UTF-8. Pure but for the clock.

    Args:
        run: What to report on.
        made_unix_s: When it was made; None: now.
    """
    result = account(run.starts, run.events)
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader(_HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=texts.bytes_text,
        span=texts.span_text,
        short=texts.short_s,
        share=texts.share_text,
        count=texts.count_text,
        generation=texts.generation_text,
        ending=texts.ending_text,
        utc=texts.utc_text,
    )
    script = "".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    page = environment.get_template("page.html").render(
        **_values(run, result),
        made=texts.utc_text(time.time() if made_unix_s is None else made_unix_s),
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # Should a text ever get past the escaping: no other script than this one runs.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    # JSON can hold halves of characters, which UTF-8 cannot.
    return page.encode("utf-8", errors="replace")


def _values(run: Run, result: RunAccount) -> dict[str, Any]:
    readings = readings_of(run.events)
    attempts = [attempt for generation in result.generations for attempt in generation.attempts]
    changes = [event for event in run.events if event.kind == "interval"]
    charts = TimeCharts(result)
    return {
        "name": run.name,
        "result": result,
        "begin": result.begin_unix_s,
        "headline": _headline(run.events, result, attempts),
        "generations": result.generations[-_MAX_GENERATIONS:],
        "num_hidden": max(len(result.generations) - _MAX_GENERATIONS, 0),
        "interval": charts.interval(readings),
        "changes": [_change(event, result.begin_unix_s) for event in changes[-_MAX_ROWS:]][::-1],
        "num_changes": len(changes),
        "overhead": charts.overhead(readings),
        "losses": _loss_table(result.losses),
        "loss_bars": _loss_bars(result.generations),
        "is_again_unknown": any(g.ending in ("failure", "restart", "resize") for g in result.generations)
        and not any(event.kind in ("progress", "resumed") for event in run.events),
        "spreads": _spreads(attempts),
        "ranks": rank_rows(attempts)[:_MAX_ROWS],
        "bandwidth": charts.bandwidth(attempts),
        "traffic": _traffic(attempts),
        "num_events": len(run.events),
        "num_shown": len(shown_events(run.events)),
        "data": script_json(page_data(result, run.events)) if result.generations else Markup("null"),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Tile:
    """A number that stands at the top."""

    name: str
    value: str
    note: str = ""


def _headline(events: Sequence[Event], result: RunAccount, attempts: Sequence[Attempt]) -> list[_Tile]:
    bound = result.max_overhead
    is_over = result.overhead is not None and bound is not None and result.overhead > bound
    num_committed = sum(attempt.is_committed for attempt in attempts)
    num_restores = sum(e.kind == "restored" and bool(e.facts.get("parent")) for e in events)
    restarts = [g for g in result.generations if g.ending in ("failure", "restart")]
    kinds = sorted({kind for g in restarts for kind in g.failure_kinds})
    return [
        _Tile(
            "Steps", texts.count_text(result.reached_step), "that count, at least" if _is_open(result) else ""
        ),
        _Tile("Wall time", texts.span_text(result.losses.wall_s), "without times between jobs"),
        _Tile("Productive (ETTR)", texts.share_text(result.losses.ettr), "of the wall time"),
        _Tile(
            "Overhead",
            texts.share_text(result.overhead),
            ("above" if is_over else "within") + f" the bound of {texts.share_text(bound)}"
            if bound is not None and result.overhead is not None
            else "not in this telemetry",
        ),
        _Tile("Checkpoints", f"{num_committed:,}", f"{len(attempts) - num_committed:,} given up"),
        _Tile("Failures", f"{len(restarts):,}", ", ".join(kinds) if kinds else "that led to a restart"),
        _Tile("Restores", f"{num_restores:,}", f"{texts.plural(len(result.generations), 'generation')}"),
        _Tile("Steps lost", *_steps_lost(result)),
    ]


def _is_open(result: RunAccount) -> bool:
    return bool(result.generations) and not result.generations[-1].is_reached_exact


def _steps_lost(result: RunAccount) -> tuple[str, str]:
    ended = [g for g in result.generations if g.ending not in ("open", "finished")]
    num_lost = sum(g.steps_lost for g in ended)
    if all(g.is_reached_exact for g in ended):
        return f"{num_lost:,}", "taken again, or left behind"
    return (
        f"≥ {num_lost:,}" if num_lost else "unknown"
    ), "the last steps before a restart are not in this telemetry"


def _change(event: Event, begin_unix_s: float) -> dict[str, Any]:
    return {
        "at": texts.span_text(max(event.unix_s - begin_unix_s, 0.0)),
        "generation": event.generation,
        "interval": texts.short_s(event.number("interval_s")),
        "by": (event.text("decided_by") or texts.NONE).replace("_", " "),
        "why": event.text("change") or "",
    }


def _loss_table(losses: Losses) -> list[dict[str, Any]]:
    return [
        {"kind": field, "name": name, "seconds": getattr(losses, field), "meaning": meaning}
        for field, name, meaning in _LOSS_ROWS
    ]


def _loss_bars(generations: Sequence[GenerationAccount]) -> list[dict[str, Any]]:
    """Return the generations that lost most, in their order, each with its losses as shares of the largest."""
    lost = {g.start.generation: g.losses.wall_s - g.losses.productive_s for g in generations}
    largest = max(lost.values(), default=0.0)
    if largest <= 0:
        return []
    most = sorted(generations, key=lambda g: -lost[g.start.generation])[:20]
    return [
        {
            "generation": str(g.start.generation),
            "seconds": lost[g.start.generation],
            "parts": [
                (row["kind"], row["name"], row["seconds"], 100 * row["seconds"] / largest)
                for row in _loss_table(g.losses)
                if row["seconds"] > 0
            ],
        }
        for g in sorted(most, key=lambda g: g.start.generation)
    ]


def _spreads(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    committed = [attempt for attempt in attempts if attempt.is_committed]
    rows: list[tuple[str, list[float], str]] = [
        ("stall of a checkpoint", [attempt.stall_s for attempt in committed], "is-stall"),
        ("upload of a checkpoint", [attempt.persist_s for attempt in committed], "is-persist"),
    ]
    return [
        {"name": name, "spread": spread(values), "figure": histogram(values, name, kind)}
        for name, values, kind in rows
        if values
    ]


def _traffic(attempts: Sequence[Attempt]) -> dict[str, str] | None:
    committed = [attempt for attempt in attempts if attempt.is_committed]
    sizes = spread(float(attempt.num_bytes) for attempt in committed)
    if sizes is None:
        return None
    rates = spread(a.num_bytes / a.persist_s for a in committed if a.persist_s > 0)
    given_up = sum(attempt.num_bytes for attempt in attempts if not attempt.is_committed)
    facts = {
        "Uploaded in checkpoints": texts.bytes_text(sum(attempt.num_bytes for attempt in committed)),
        "A checkpoint, median": texts.bytes_text(sizes.median),
        "Bandwidth of an upload, median": texts.rate_text(rates.median if rates else None),
        "Bandwidth, fastest upload": texts.rate_text(rates.highest if rates else None),
    }
    if given_up:
        facts["Uploaded for attempts that were given up"] = texts.bytes_text(given_up)
    return facts
