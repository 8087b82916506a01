"""What a run's store holds, checkpoint by checkpoint. Judging only; reading happens elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from raycheck.core.layout import MANIFEST, Manifest, sums_name
from raycheck.core.lineage import CheckpointRef, GenerationId, GenerationRecord, full_chain, selectable
from raycheck.errors import CheckpointNotFoundError

State = Literal["usable", "registered", "fenced", "incomplete", "damaged", "damaged-size"]
Place = Literal["tip", "ancestor", "left behind"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One folder below ``checkpoints/``, as it was read."""

    ref: CheckpointRef
    sizes: Mapping[str, int]
    """Bytes of each object, by its name in the folder."""

    manifest: Manifest | None
    fault: str = ""
    """Why a manifest that is there could not be read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run besides its checkpoints."""

    tip: GenerationRecord | None
    claims: Collection[GenerationId]
    has_ended: bool
    """Whether the newest start came to its normal end; if not, its job may be alive."""

    layouts: Collection[str]
    """Digests of the layouts that are in the store."""

    registered: Collection[CheckpointRef]
    """Those that belong to Ray Train."""

    @property
    def newest_claim(self) -> GenerationId | None:
        """The newest start."""
        return max(self.claims, default=None)

    @property
    def starting(self) -> GenerationId | None:
        """The newest start, if it has not recorded what it restored: it may be reading any checkpoint."""
        newest = self.newest_claim
        if newest is None or (self.tip is not None and newest <= self.tip.generation):
            return None
        return newest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint, or what there is of one, and whether it can be used."""

    ref: CheckpointRef
    state: State
    place: Place
    is_registered: bool
    manifest: Manifest | None
    num_bytes: int
    note: str
    """What is wrong with it; "" if nothing is."""

    @property
    def is_usable(self) -> bool:
        """Whether a start would take it, as far as names and sizes tell."""
        return self.state in ("usable", "registered")

    @property
    def created_unix_s(self) -> float | None:
        """When it was committed; None if that is not known."""
        return None if self.manifest is None else self.manifest.created_unix_s


def take_stock(facts: RunFacts, found: Iterable[Found]) -> list[Stored]:
    """Return what was found with its state, by step."""
    listed = sorted(found, key=lambda each: each.ref)
    counting = set(selectable(facts.tip, [each.ref for each in listed]))
    return [_judge(each, facts, each.ref in counting) for each in listed]


def _judge(found: Found, facts: RunFacts, counts: bool) -> Stored:
    is_registered = found.ref in facts.registered
    state, note = _state_of(found, facts, counts, is_registered)
    is_tip = facts.tip is not None and found.ref.generation == facts.tip.generation
    return Stored(
        ref=found.ref,
        state=state,
        place="left behind" if not counts else "tip" if is_tip else "ancestor",
        is_registered=is_registered,
        manifest=found.manifest,
        num_bytes=sum(found.sizes.values()),
        note=note,
    )


def _state_of(found: Found, facts: RunFacts, counts: bool, is_registered: bool) -> tuple[State, str]:
    if MANIFEST not in found.sizes:
        may_live = found.ref.generation == facts.newest_claim and not facts.has_ended
        return "incomplete", "no manifest: " + ("being written, or left over" if may_live else "left over")
    if found.manifest is None:
        return "damaged", found.fault
    fault = _size_fault(found.manifest, found.sizes, facts.layouts)
    if fault:
        return "damaged-size", fault
    if not counts:
        return "fenced", _why_left_behind(found.ref, facts.tip)
    return ("registered" if is_registered else "usable"), ""


def _size_fault(manifest: Manifest, sizes: Mapping[str, int], layouts: Collection[str]) -> str:
    for shard in manifest.shards:
        if shard.name not in sizes:
            return f"{shard.name} is missing"
        if sizes[shard.name] != shard.num_bytes:
            return f"{shard.name} has {sizes[shard.name]} bytes, {shard.num_bytes} were committed"
        if sums_name(shard.name) not in sizes:
            return f"{sums_name(shard.name)} is missing"
    if manifest.layout_digest not in layouts:
        return f"layout {manifest.layout_digest} is missing"
    return ""


def _why_left_behind(ref: CheckpointRef, tip: GenerationRecord | None) -> str:
    if tip is None:
        return "no record says which checkpoints count"
    limits = full_chain(tip)
    if ref.generation in limits:
        return f"the run went on from step {limits[ref.generation]} of {ref.generation}"
    return f"{ref.generation} is not among the ancestors of {tip.generation}"


def newest_usable(stock: Sequence[Stored]) -> Stored | None:
    """Return what a start would restore; None if there is nothing."""
    return max((each for each in stock if each.is_usable), key=lambda each: each.ref, default=None)


def select(stock: Sequence[Stored], step: int | None) -> Stored:
    """Return the committed checkpoint of a step: the one that counts, if there are several.

    Args:
        stock: All that there are.
        step: None: the newest that is usable.

    Raises:
        CheckpointNotFoundError: If there is none.
    """
    committed = [each for each in stock if each.state != "incomplete"]
    if step is None:
        newest = newest_usable(stock)
        if newest is not None:
            return newest
        raise CheckpointNotFoundError(
            f"no checkpoint of this run is usable ({_count_text(stock)}); --step takes one that does not count",
            available=[],
        )
    same = [each for each in committed if each.ref.step == step]
    if not same:
        steps = sorted({each.ref.step for each in committed})
        raise CheckpointNotFoundError(
            f"--step {step}: no checkpoint of step {step} in this run; there are {_steps_text(steps)}",
            step=step,
            available=steps,
        )
    return max(same, key=lambda each: (each.is_usable, each.place != "left behind", each.ref))


def _count_text(stock: Sequence[Stored]) -> str:
    counts: dict[str, int] = {}
    for each in stock:
        counts[each.state] = counts.get(each.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "there are none"


def _steps_text(steps: Sequence[int]) -> str:
    if len(steps) > 20:
        return f"{', '.join(map(str, steps[:5]))} ... {', '.join(map(str, steps[-15:]))}"
    return ", ".join(map(str, steps)) or "none"
