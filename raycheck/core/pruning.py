"""Which checkpoints ``raycheck prune`` deletes. Deciding only; deletion happens elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from raycheck.core.inventory import RunFacts, Stored
from raycheck.core.lineage import CheckpointRef
from raycheck.core.retention import to_delete

LIVE_KEEP = 2
"""The newest that stay while a job may be alive: it falls back by one if the newest turns out damaged."""

START_GRACE_S = 3600.0
"""A start that has recorded nothing for so long is over."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the user wants kept."""

    keep: int = 1
    """How many of the newest usable ones, at least 1. Registered ones are not among them: they are Ray's."""

    older_than_s: float | None = None
    """Only what was committed longer ago goes, seconds. None: age does not matter."""

    keep_every_steps: int | None = None
    """As in the settings of a run."""

    keep_every_s: float | None = None
    """As in the settings of a run."""

    is_running: bool = True
    """Whether a job of this run may be alive. False: the user vouches that none is."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"--keep {self.keep}: must be at least 1, so that there is one to restore")
        if self.keep_every_steps is not None and self.keep_every_steps < 1:
            raise ValueError(f"--keep-every-steps {self.keep_every_steps}: must be at least 1")


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint, and whether it goes."""

    stored: Stored
    goes: bool
    reason: str


def may_be_alive(facts: RunFacts, rules: Rules) -> bool:
    """Return whether a job may be working on this run."""
    return rules.is_running and bool(facts.claims) and not facts.has_ended


def refusal(facts: RunFacts, rules: Rules, *, claimed_unix_s: float | None, now_unix_s: float) -> str | None:
    """Return why nothing of this run may be deleted now; None if something may.

    Args:
        facts: The run.
        rules: The user's.
        claimed_unix_s: When its newest start claimed its generation; None if that is not known.
        now_unix_s: The wall clock.
    """
    if facts.tip is None:
        return "no record in generations/ says which checkpoints count, so none can be said to be old"
    starting = facts.starting
    if starting is None or not may_be_alive(facts, rules):
        return None
    if claimed_unix_s is not None and now_unix_s - claimed_unix_s > START_GRACE_S:
        return None
    return (
        f"{starting} is starting and may be reading any checkpoint; try again when it has begun to train, "
        "or give --not-running if you know that no job of this run is alive"
    )


def choose(stock: Sequence[Stored], facts: RunFacts, rules: Rules, *, now_unix_s: float) -> list[Choice]:
    """Return for each checkpoint whether it goes and why, in the order given.

    Whatever the rules: one usable checkpoint stays if there is one, two while
    a job may be alive. Registered, damaged and incomplete ones stay, and those
    whose generation has no claim here.
    """
    keep = max(rules.keep, LIVE_KEEP) if may_be_alive(facts, rules) else rules.keep
    mine = [each for each in stock if each.state == "usable" and each.ref.generation in facts.claims]
    created = {each.ref: each.created_unix_s for each in mine if each.created_unix_s is not None}
    superfluous = set(
        to_delete(
            [each.ref for each in mine],
            keep_last=keep,
            keep_every_steps=rules.keep_every_steps,
            keep_every_s=rules.keep_every_s,
            created_unix_s=created,
        )
    )
    newest = {each.ref for each in sorted(mine, key=lambda each: each.ref)[-keep:]}
    return [_choose_one(each, facts, rules, superfluous, newest, now_unix_s) for each in stock]


def _choose_one(
    stored: Stored,
    facts: RunFacts,
    rules: Rules,
    superfluous: set[CheckpointRef],
    newest: set[CheckpointRef],
    now_unix_s: float,
) -> Choice:
    protection = _protection(stored, facts)
    if protection:
        return Choice(stored, False, protection)
    if stored.ref in newest:
        return Choice(stored, False, "among the newest" if len(newest) > 1 else "the newest")
    if stored.state == "usable" and stored.ref not in superfluous:
        return Choice(stored, False, "the first of its period")
    if rules.older_than_s is not None:
        created_unix_s = stored.created_unix_s
        if created_unix_s is None or now_unix_s - created_unix_s <= rules.older_than_s:
            return Choice(stored, False, "not old enough")
    return Choice(stored, True, "left behind" if stored.state == "fenced" else "beyond the newest")


def _protection(stored: Stored, facts: RunFacts) -> str:
    if stored.is_registered:
        return "registered: it is Ray Train's to delete"
    if stored.ref.generation not in facts.claims:
        return "its generation has no claim here: another run's"
    if stored.state == "incomplete":
        return "not committed: a later start clears it away"
    if stored.state in ("damaged", "damaged-size"):
        return "damaged: look at it, then delete it by hand"
    return ""
