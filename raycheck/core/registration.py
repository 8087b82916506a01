"""Which checkpoints become Ray Train's. Deciding only.

Ray Train deletes the folder of what is registered when it likes, through
``CheckpointConfig(num_to_keep)``: never the one that was registered last,
except that a checkpoint which the user reports takes its place. So what is
registered along the way has a newer one behind it, which Ray knows nothing
of; only what ends a run may be the newest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from raycheck.core.lineage import CheckpointRef

DEFAULT_EVERY_S = 600.0


def chosen_every_s(given_s: float | None, *, num_to_keep: int | None) -> float | None:
    """Return how often one is registered along the way, seconds; None: only the last.

    Without a limit of its own Ray keeps all for good, so that a run of days
    would fill its storage with what nobody asked to keep.
    """
    if given_s is not None:
        return given_s
    return None if num_to_keep is None else DEFAULT_EVERY_S


def along_the_way(
    committed: Sequence[CheckpointRef],
    registered: Collection[CheckpointRef],
    *,
    created_unix_s: Mapping[CheckpointRef, float],
    last_unix_s: float | None,
    every_s: float,
) -> CheckpointRef | None:
    """Return the checkpoint to register now, or None.

    Args:
        committed: The lineage's checkpoints, oldest first.
        registered: Those that are Ray's already.
        created_unix_s: When they were committed, as far as that is known.
        last_unix_s: When the one that was registered last had been committed;
            None: none ever was, and the first is due at once.
        every_s: The least time between two of them.
    """
    if len(committed) < 2:
        return None
    behind = committed[-2]
    if behind in registered:
        return None
    if last_unix_s is None:
        return behind
    created = created_unix_s.get(behind)
    # A clock that was set back must not keep a run from registering for as long.
    return behind if created is not None and not 0 <= created - last_unix_s < every_s else None


def at_the_end(
    committed: Sequence[CheckpointRef], registered: Collection[CheckpointRef]
) -> CheckpointRef | None:
    """Return the newest checkpoint, unless it is Ray's already or there is none."""
    newest = committed[-1] if committed else None
    return None if newest is None or newest in registered else newest
