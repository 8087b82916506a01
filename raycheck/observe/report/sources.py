"""What a report is made from, as the store has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.telemetry import Event, events_of, number, parse_generation
from raycheck.core.time_spent import Start
from raycheck.errors import ObjectNotFoundError
from raycheck.observe.events import read_events
from raycheck.store.run import RunStore


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A run as its store tells of it."""

    name: str
    starts: tuple[Start, ...]
    events: tuple[Event, ...]
    """In the order of time."""


def read_run(run_store: RunStore, name: str) -> Run:
    """Return what a report needs. Blocks for storage: two reads per generation, one per object of telemetry.

    Works while the run is going on. Telemetry and records that are damaged are
    left out with a warning.

    Raises:
        StorageError: If the store cannot be read.
    """
    events = tuple(events_of(read_events(run_store.store)))
    parents = _told_parents(events)
    records = {record.generation: record for record in run_store.records()}
    starts = []
    for generation in sorted({*run_store.claims(), *records, *parents}):
        record = records.get(generation)
        facts = _claim_facts(run_store, generation)
        parent = record.parent if record else parents.get(generation)
        world_size = record.world_size if record else facts.get("world_size")
        starts.append(
            Start(
                generation=generation,
                claimed_unix_s=_clock(facts.get("claimed_unix_s")),
                world_size=world_size if type(world_size) is int and world_size > 0 else None,
                has_record=record is not None or generation in parents,
                parent=(parent.step, parent.generation) if parent else None,
                failures=_failures(facts.get("failure_rate")),
                has_ended=run_store.end_facts(generation) is not None,
            )
        )
    return Run(name, tuple(starts), events)


def _told_parents(events: tuple[Event, ...]) -> dict[GenerationId, CheckpointRef | None]:
    """Return what generations restored by their events alone: a record may have been lost."""
    found: dict[GenerationId, CheckpointRef | None] = {}
    for event in events:
        generation = parse_generation(event.generation)
        if event.kind == "restored" and generation is not None:
            found[generation] = _ref(event.facts.get("parent"))
    return found


def _ref(fields: object) -> CheckpointRef | None:
    if not (isinstance(fields, list) and len(fields) == 3 and isinstance(fields[1], str)):
        return None
    generation = parse_generation(fields[1])
    if generation is None or type(fields[0]) is not int or type(fields[2]) is not int or fields[0] < 0:
        return None
    return CheckpointRef(fields[0], generation, fields[2])


def _claim_facts(run_store: RunStore, generation: GenerationId) -> dict[str, Any]:
    try:
        return run_store.claim_facts(generation)
    except ObjectNotFoundError:
        return {}


def _clock(value: object) -> float | None:
    seconds = number(value)
    return seconds if seconds is not None and seconds <= 1e11 else None


def _failures(rate: object) -> dict[str, int] | None:
    """Return a claim's failures by kind; None if it does not tell."""
    failures = rate.get("failures") if isinstance(rate, Mapping) else None
    if not isinstance(failures, Mapping):
        return None
    return {str(kind): count for kind, count in failures.items() if type(count) is int}
