"""Which generations, and so which checkpoints, count.

Every start of a worker group is a generation. It writes its claim, chooses a
parent checkpoint, and once all ranks have restored it writes its record with
the whole chain of ancestors. The tip is the highest record; a checkpoint
counts if its generation is in the tip's chain, at or below the step where
the next one left it. So a writer that was cut off and wakes up late changes
nothing that anyone selects, and two drivers started at once leave one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from raycheck.errors import CheckpointNotFoundError


class GenerationId(NamedTuple):
    """One start of a worker group. Ordered by number, then by id."""

    number: int
    id: str

    def __str__(self) -> str:
        return f"g{self.number:06d}-{self.id}"


class CheckpointRef(NamedTuple):
    """A checkpoint's place: step first, so that refs sort by step."""

    step: int
    generation: GenerationId
    plan_id: int


class Ancestor(NamedTuple):
    """A generation in a chain, and the last step at which its checkpoints count."""

    generation: GenerationId
    left_at_step: int


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRecord:
    """What a generation writes once it has restored: where it came from."""

    generation: GenerationId
    world_size: int
    parent: CheckpointRef | None
    chain: tuple[Ancestor, ...]
    """Ancestors, oldest first, this generation not included."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "format": 1,
            "generation": list(self.generation),
            "world_size": self.world_size,
            "parent": None
            if self.parent is None
            else [self.parent.step, *self.parent.generation, self.parent.plan_id],
            "chain": [[*a.generation, a.left_at_step] for a in self.chain],
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> GenerationRecord:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: If it is not such a record.
        """
        try:
            number, id_ = fields["generation"]
            parent = fields["parent"]
            return cls(
                generation=_generation(number, id_),
                world_size=_count(fields["world_size"]),
                parent=None
                if parent is None
                else CheckpointRef(_count(parent[0]), _generation(parent[1], parent[2]), _count(parent[3])),
                chain=tuple(Ancestor(_generation(n, i), _count(left)) for n, i, left in fields["chain"]),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a generation record: {error!r}") from error


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"not a count: {value!r}")
    return value


def _generation(number: object, id_: object) -> GenerationId:
    if not isinstance(id_, str) or not re.fullmatch(r"[0-9a-f]{1,64}", id_):
        raise ValueError(f"not a generation id: {id_!r}")
    return GenerationId(_count(number), id_)


def next_number(claims: Collection[GenerationId]) -> int:
    """Return the number for a new claim: one above all that exist."""
    return max((claim.number for claim in claims), default=0) + 1


def newer_claim(mine: GenerationId, claims: Iterable[GenerationId]) -> GenerationId | None:
    """Return the highest claim above ``mine``, the one that fences it, or None."""
    newest = max(claims, default=mine)
    return newest if newest > mine else None


def tip(records: Iterable[GenerationRecord]) -> GenerationRecord | None:
    """Return the record of the highest generation that has one: the run as it stands."""
    return max(records, key=lambda record: record.generation, default=None)


def full_chain(record: GenerationRecord) -> dict[GenerationId, int | None]:
    """Return for each generation that counts the last step that does; None: no limit, it is the tip."""
    limits: dict[GenerationId, int | None] = {a.generation: a.left_at_step for a in record.chain}
    limits[record.generation] = None
    return limits


def selectable(tip_record: GenerationRecord | None, refs: Iterable[CheckpointRef]) -> list[CheckpointRef]:
    """Return the refs that count, newest first.

    Whether each is complete is for the caller to see: its manifest exists or
    it does not.
    """
    if tip_record is None:
        return []
    limits = full_chain(tip_record)
    return sorted((ref for ref in refs if _counts(ref, limits)), reverse=True)


def _counts(ref: CheckpointRef, limits: dict[GenerationId, int | None]) -> bool:
    if ref.generation not in limits:
        return False
    limit = limits[ref.generation]
    return limit is None or ref.step <= limit


def record_for(
    generation: GenerationId,
    *,
    world_size: int,
    parent: CheckpointRef | None,
    tip_record: GenerationRecord | None,
) -> GenerationRecord:
    """Return the record of a generation that restored ``parent``.

    Args:
        generation: The new generation.
        world_size: Its number of ranks.
        parent: What all of its ranks restored; None for a fresh start, which
            leaves all earlier generations behind.
        tip_record: The tip that ``parent`` was selected from.

    Raises:
        ValueError: If ``parent`` is not selectable from ``tip_record``.
    """
    if parent is None:
        return GenerationRecord(generation, world_size, None, ())
    if not selectable(tip_record, [parent]):
        raise ValueError(f"{parent} does not count in the lineage of {tip_record}")
    assert tip_record is not None
    chain = []
    for generation_id, limit in full_chain(tip_record).items():
        if generation_id == parent.generation:
            chain.append(Ancestor(generation_id, parent.step))
            break
        # Later generations are left behind; an ancestor keeps its own limit,
        # but a roll-back may have gone below it.
        assert limit is not None
        chain.append(Ancestor(generation_id, min(limit, parent.step)))
    return GenerationRecord(generation, world_size, parent, tuple(chain))


def candidates(resume: int | str, selectable_refs: Sequence[CheckpointRef]) -> list[CheckpointRef]:
    """Return what a new generation may restore, best first; empty for a fresh start.

    Args:
        resume: "auto", "fresh" or a step, as in the settings.
        selectable_refs: Those that count, newest first.

    Raises:
        CheckpointNotFoundError: If a step is asked for that does not exist.
    """
    if resume == "fresh":
        return []
    if resume == "auto":
        return list(selectable_refs)
    wanted = [ref for ref in selectable_refs if ref.step == resume]
    if not wanted:
        steps = sorted({ref.step for ref in selectable_refs})
        listed = ", ".join(map(str, steps)) or "none"
        raise CheckpointNotFoundError(
            f"resume={resume}: no checkpoint of step {resume} in this run; available steps: {listed}",
            step=resume,
            available=steps,
        )
    return wanted
