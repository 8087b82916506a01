"""How a run stands, for those who watch it: from its coordinator, or from its telemetry alone.

Pure: values in, a `View` out. What is not known is None, whoever does not tell
it: another version of raycheck, a run that has just begun, or telemetry, which
knows nothing between two checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from raycheck.core.layout import ROOT
from raycheck.core.telemetry import Event, events_of, number, parse_generation, readings_of
from raycheck.observe.report.texts import event_text

Source = Literal["coordinator", "telemetry"]

_ALIVE_S = 90.0
"""A job that trains is heard of in its telemetry at least this often: every minute, and flushed a little later."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UploadView:
    """How far the uploads of one node are."""

    node: str
    ranks: tuple[int, ...]
    num_bytes_done: int
    num_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How a run stands at one moment."""

    unix_s: float
    run: str
    """Its name, as the storage path ends."""

    store_url: str
    source: Source
    is_over: bool = False
    """Whether its job has come to an end, as far as is known."""

    heard_age_s: float | None = None
    """How old the newest thing is that is told of it, seconds; of telemetry only."""

    generation: str = ""
    world_size: int | None = None
    phase: str | None = None
    """"restoring", "training", "planned", "copying", "uploading" or "committing"."""

    step: int | None = None
    steps_per_s: float | None = None
    step_s: float | None = None
    safe_step: int | None = None
    """The newest committed step, or the restored one: where a restart would go on."""

    safe_age_s: float | None = None
    """Since it was committed."""

    at_risk_s: float | None = None
    at_risk_steps: int | None = None
    plan_step: int | None = None
    next_in_s: float | None = None
    """Until the next snapshot is planned, seconds, if none is; less than 0: it is due."""

    interval_s: float | None = None
    decided_by: str | None = None
    reason: str | None = None
    overhead: float | None = None
    max_overhead: float | None = None
    num_checkpoints: int | None = None
    failures_in_a_row: int = 0
    uploads: tuple[UploadView, ...] = ()
    events: tuple[Event, ...] = ()
    """The newest, oldest first."""

    @property
    def next_step(self) -> int | None:
        """The step of the next checkpoint: as planned, or about where it will be planned."""
        if self.plan_step is not None:
            return self.plan_step
        if self.step is None or self.next_in_s is None or self.steps_per_s is None:
            return None
        return self.step + max(round(self.next_in_s * self.steps_per_s), 1)

    @property
    def next_snapshot_s(self) -> float | None:
        """About how long until training gets there, seconds."""
        if self.plan_step is None:
            return None if self.next_in_s is None else max(self.next_in_s, 0.0)
        if self.step is None or not self.steps_per_s:
            return None
        return max(self.plan_step - self.step, 0) / self.steps_per_s

    @property
    def last_checkpoint(self) -> Event | None:
        """The newest that is told of."""
        return next((event for event in reversed(self.events) if event.kind == "checkpoint"), None)


def run_name(store_url: str) -> str:
    """Return the name of the run whose store this is."""
    parts = [part for part in store_url.partition("?")[0].rstrip("/").split("/") if part]
    if len(parts) > 1 and parts[-1] == ROOT:
        parts.pop()
    return parts[-1] if parts else store_url


def is_of_run(run: str, store_url: str) -> bool:
    """Whether somebody who says ``run`` means this store: by its URL, that of the run's folder, or the name."""
    place, url = (text.partition("?")[0].rstrip("/") for text in (run, store_url))
    return place in (url, url.removesuffix(f"/{ROOT}"), run_name(store_url))


def view_of_status(status: Mapping[str, Any], now_unix_s: float) -> View:
    """Return the view that a coordinator's status gives.

    Args:
        status: As `Coordinator.status` returns it.
        now_unix_s: When it was asked.
    """
    facts = Event(now_unix_s, "status", "", "", status)
    url = facts.text("store_url") or ""
    plan = status.get("plan")
    next_in_s = status.get("next_in_s")
    events = tuple(events_of(status.get("events") or ()))
    return View(
        unix_s=now_unix_s,
        run=run_name(url),
        store_url=url,
        source="coordinator",
        generation=facts.text("generation") or "",
        world_size=facts.count("world_size"),
        phase=facts.text("phase"),
        step=facts.count("step"),
        steps_per_s=facts.number("steps_per_s"),
        step_s=facts.number("step_s"),
        safe_step=facts.count("safe_step"),
        safe_age_s=facts.number("safe_age_s"),
        at_risk_s=facts.number("at_risk_s"),
        at_risk_steps=facts.count("at_risk_steps"),
        plan_step=plan[1] if isinstance(plan, list) and len(plan) == 2 else None,
        next_in_s=None if next_in_s is None else number(max(next_in_s, 0.0)),
        interval_s=facts.number("interval_s"),
        decided_by=facts.text("decided_by"),
        reason=facts.text("reason"),
        overhead=facts.number("overhead"),
        max_overhead=facts.number("max_overhead"),
        num_checkpoints=facts.count("num_checkpoints"),
        failures_in_a_row=facts.count("failures_in_a_row") or 0,
        uploads=tuple(_upload(each) for each in status.get("uploads") or ()),
        events=events,
        is_over=bool(events) and events[-1].kind == "closed",
    )


def _upload(told: Mapping[str, Any]) -> UploadView:
    return UploadView(
        node=str(told["node"]),
        ranks=tuple(told["ranks"]),
        num_bytes_done=told["num_bytes_done"],
        num_bytes=told["num_bytes"],
        seconds=told["seconds"],
    )


def view_of_events(store_url: str, events: Sequence[Event], now_unix_s: float) -> View:
    """Return the view that a run's telemetry gives.

    Args:
        store_url: Where it lies.
        events: The newest ones, in the order of time.
        now_unix_s: When they were read.
    """
    known = [event for event in events if parse_generation(event.generation)]
    newest = max((event.generation for event in known), default="")
    own = [event for event in known if event.generation == newest]
    heard_age_s = now_unix_s - events[-1].unix_s if events else None
    saved = next((event for event in reversed(own) if event.kind in ("checkpoint", "restored")), None)
    steps = [event.count("step") or 0 for event in own if event.kind in ("checkpoint", "progress", "resumed")]
    safe_step = saved.count("step") if saved else None
    step = max([*steps, safe_step or 0]) if own else None
    reading = next(reversed(readings_of(own)), None)
    return View(
        unix_s=now_unix_s,
        run=run_name(store_url),
        store_url=store_url,
        source="telemetry",
        is_over=bool(own) and own[-1].kind == "closed",
        heard_age_s=heard_age_s,
        generation=newest,
        world_size=next((e.count("world_size") for e in reversed(own) if e.kind == "generation"), None),
        step=step,
        step_s=reading.step_s if reading else None,
        safe_step=safe_step,
        safe_age_s=now_unix_s - saved.unix_s if saved and saved.kind == "checkpoint" else None,
        at_risk_steps=step - safe_step if step is not None and safe_step is not None else None,
        interval_s=reading.interval_s if reading else None,
        decided_by=reading.decided_by if reading else None,
        reason=reading.reason if reading else None,
        overhead=reading.overhead if reading else None,
        max_overhead=reading.max_overhead if reading else None,
        events=tuple(events),
    )


def is_silent(view: View) -> bool:
    """Whether nothing has been heard for longer than a job that trains would be silent."""
    return view.heard_age_s is not None and view.heard_age_s > _ALIVE_S


def new_events(before: View | None, now: View) -> list[Event]:
    """Return the events that were not there before, in the order of time."""
    seen = {(event.writer, event.unix_s, event.kind) for event in before.events} if before else set()
    return [event for event in now.events if (event.writer, event.unix_s, event.kind) not in seen]


def to_json(view: View, events: Sequence[Event]) -> dict[str, Any]:
    """Return a view as plain JSON values, with these events."""
    fields = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
    return {
        **fields,
        "next_step": view.next_step,
        "next_snapshot_s": view.next_snapshot_s,
        "uploads": [dataclasses.asdict(upload) for upload in view.uploads],
        "events": [
            {
                "unix_s": event.unix_s,
                "kind": event.kind,
                "generation": event.generation,
                "step": event.count("step"),
                "text": event_text(event),
            }
            for event in events
        ],
    }
