"""How all ranks come to restore one checkpoint: a vote without I/O.

The coordinator offers every rank the same checkpoint. Each reads and verifies
its bytes and says how it went; only when all are well does anyone touch live
state. If one is not, all get the next older offer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from raycheck.core.lineage import CheckpointRef


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """Read this checkpoint and report; None: there is nothing to restore."""

    ranks: tuple[int, ...]
    ref: CheckpointRef | None


@dataclasses.dataclass(frozen=True, slots=True)
class Reject:
    """A checkpoint turned out to be unusable; worth one warning."""

    ref: CheckpointRef
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Proceed:
    """All ranks hold verified bytes of this checkpoint: load them."""

    ref: CheckpointRef | None


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """No rank loads anything; the run ends with this message."""

    message: str
    is_mismatch: bool


Action = Offer | Reject | Proceed | Refuse


class RestoreVote:
    """Agrees on one checkpoint among all ranks of a generation.

    Args:
        world_size: Ranks that vote.
        candidates: Usable as far as known, best first.
        is_exact: The user named the step: never fall back to another.
    """

    def __init__(self, *, world_size: int, candidates: Sequence[CheckpointRef], is_exact: bool) -> None:
        self._world_size = world_size
        self._candidates = list(candidates)
        self._had_any = bool(candidates)
        self._is_exact = is_exact
        self._asked: set[int] = set()
        self._well: set[int] = set()
        self._end: Proceed | Refuse | None = None

    @classmethod
    def decided(cls, ref: CheckpointRef | None, *, world_size: int) -> RestoreVote:
        """Return a vote that has ended with ``ref``: the generation's record says so."""
        vote = cls(world_size=world_size, candidates=[ref] if ref else [], is_exact=False)
        vote._end = Proceed(ref)
        return vote

    @property
    def is_over(self) -> bool:
        """Whether the vote has come to its end."""
        return self._end is not None

    def ask(self, rank: int) -> list[Action]:
        """A rank wants to know what to restore. May be repeated."""
        self._asked.add(rank)
        if self._end is not None:
            return [self._end]
        return [Offer((rank,), self._current)]

    def report(
        self, rank: int, ref: CheckpointRef | None, error: str | None, *, is_mismatch: bool = False
    ) -> list[Action]:
        """A rank has verified its bytes of ``ref``, or has not.

        Args:
            rank: Who reports.
            ref: What it was offered; a report on an earlier offer is ignored.
            error: None if all is well.
            is_mismatch: The checkpoint is sound but is another model's: an
                older one would be as well, so nothing is loaded.
        """
        if self._end is not None or ref != self._current:
            return []
        if error is None:
            self._well.add(rank)
            return self._finish(Proceed(ref)) if len(self._well) == self._world_size else []
        if is_mismatch or ref is None:
            return self._finish(Refuse(error, is_mismatch=is_mismatch))
        return [Reject(ref, error), *self._fall_back(ref, error)]

    @property
    def _current(self) -> CheckpointRef | None:
        return self._candidates[0] if self._candidates else None

    def _fall_back(self, ref: CheckpointRef, error: str) -> list[Action]:
        self._candidates.pop(0)
        self._well.clear()
        if self._is_exact:
            return self._finish(
                Refuse(f"step {ref.step} was asked for and cannot be restored: {error}", is_mismatch=False)
            )
        if not self._candidates:
            return self._finish(
                Refuse(
                    "this run has checkpoints, but none of them can be restored; the last one tried, "
                    f'step {ref.step}, failed with: {error}. Set resume="fresh" to start again at step 0',
                    is_mismatch=False,
                )
            )
        return [Offer(tuple(sorted(self._asked)), self._current)]

    def _finish(self, end: Proceed | Refuse) -> list[Action]:
        self._end = end
        return [end]
