"""Which checkpoints to keep. Deciding only; deletion happens elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from raycheck.core.lineage import CheckpointRef


def to_delete(
    committed: Iterable[CheckpointRef],
    *,
    keep_last: int,
    protected: Collection[CheckpointRef] = (),
) -> list[CheckpointRef]:
    """Return the checkpoints that may go, oldest first.

    Args:
        committed: Committed checkpoints of this run's lineage. Others are
            nobody's to judge and must not be passed.
        keep_last: How many of the newest stay, at least 1, so that there is
            always one to restore.
        protected: Refs that stay whatever their age, such as those registered
            with Ray Train or being read by a restore.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: must be at least 1")
    newest_first = sorted(set(committed), reverse=True)
    return sorted(ref for ref in newest_first[keep_last:] if ref not in protected)
