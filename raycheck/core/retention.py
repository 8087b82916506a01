"""Which checkpoints to keep. Deciding only; deletion happens elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from raycheck.core.lineage import CheckpointRef


def to_delete(
    committed: Iterable[CheckpointRef],
    *,
    keep_last: int,
    keep_every_steps: int | None = None,
    keep_every_s: float | None = None,
    created_unix_s: Mapping[CheckpointRef, float] | None = None,
    protected: Collection[CheckpointRef] = (),
) -> list[CheckpointRef]:
    """Return the checkpoints that may go, oldest first.

    Depends on what exists alone, so that a restart needs to remember nothing:
    of each period the oldest stays, which is the one that stayed before.

    Args:
        committed: Committed checkpoints of this run's lineage. Others are
            nobody's to judge and must not be passed.
        keep_last: How many of the newest stay, at least 1, so that there is
            always one to restore.
        keep_every_steps: The first one at or after each multiple of this many
            steps stays too. None: none does.
        keep_every_s: The first one of each period of this many seconds stays
            too. None: none does.
        created_unix_s: When each was committed; one that is not listed stays,
            if ``keep_every_s`` is given.
        protected: Refs that stay whatever their age, such as those registered
            with Ray Train or being read by a restore.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: must be at least 1")
    oldest_first = sorted(set(committed))
    kept = {*oldest_first[-keep_last:], *protected}
    if keep_every_steps is not None:
        every = keep_every_steps
        kept |= _first_of_each(oldest_first, lambda ref: ref.step // every or None)
    if keep_every_s is not None:
        times, period_s = created_unix_s or {}, keep_every_s
        kept |= {ref for ref in oldest_first if ref not in times}
        kept |= _first_of_each([r for r in oldest_first if r in times], lambda ref: times[ref] // period_s)
    return [ref for ref in oldest_first if ref not in kept]


def _first_of_each(
    refs: Iterable[CheckpointRef], period_of: Callable[[CheckpointRef], float | None]
) -> set[CheckpointRef]:
    first: dict[float, CheckpointRef] = {}
    for ref in refs:
        period = period_of(ref)
        if period is not None:
            first.setdefault(period, ref)
    return set(first.values())
