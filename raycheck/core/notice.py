"""Notices that the end is near, and when to save because of them. Deciding only.

On a notice one checkpoint is due at once, whatever comes; training goes on,
and another is due so late that it is just durable before the end. Time that
was announced and not used would be training lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

PERSIST_ROOM = 1.5
"""A persist may take so much longer than most did: the last one shares the network with those of other nodes."""

COMMIT_S = 1.0
"""From durable shards to a manifest, seconds, with room."""

LATE_S = 60.0
"""A node that is taken away may live a little longer than was said."""

SAME_DEADLINE_S = 2.0
"""Two tellings of one deadline differ by their ways."""


@dataclasses.dataclass(frozen=True, slots=True)
class Notice:
    """Somebody has said that this job, or a node of it, will end or stop."""

    source: str
    """Who said so: "drain", "SIGTERM", "spot", "rebalance"."""

    seconds_left: float | None
    """Until the memory of some rank is gone, seconds. None: nothing was said of it."""

    detail: str = ""
    """For people: which node, and why."""

    node: str = ""
    """The node that goes; empty: all of the job, or nobody knows."""


def last_start_s(deadline_s: float, *, persist_s: float, step_s: float, lead_s: float) -> float:
    """Return when to ask for the last checkpoint, so that it exists before the deadline.

    Args:
        deadline_s: The end, on the clock of the caller.
        persist_s: From snapshot to durable, 95th percentile, seconds.
        step_s: Time of a step, seconds.
        lead_s: From asking until every rank can have seen the plan, seconds.
    """
    # The plan lies two steps ahead at least, and a snapshot is whole when the next step's update begins.
    until_staged_s = lead_s + 3 * step_s
    return deadline_s - until_staged_s - PERSIST_ROOM * persist_s - COMMIT_S


def ranks_to_spare(going: Collection[str], node_of: Mapping[int, str], world_size: int) -> tuple[int, ...]:
    """Return the ranks whose nodes go, if others stay; none while it is not known where every rank is.

    They are left with what they alone hold, which is stored the sooner: the
    rest is safe with those that stay.

    Args:
        going: Nodes that are about to go.
        node_of: The node of each rank.
        world_size: Number of ranks.
    """
    spared = tuple(rank for rank in range(world_size) if node_of.get(rank) in going)
    is_known = len(node_of) == world_size
    return spared if is_known and len(spared) < world_size else ()


class Grace:
    """What has been announced to one generation, and what was saved since. Not thread-safe.

    Args:
        lead_s: As in `last_start_s`.
    """

    def __init__(self, *, lead_s: float) -> None:
        self._lead_s = lead_s
        self.notices: dict[str, Notice] = {}
        """The newest of each source."""

        self.deadline_s: float | None = None
        """The earliest end that was told, on the clock of the caller."""

        self.going: set[str] = set()
        """Nodes that go. One that is merely at risk may stay for days."""

        self._first_asked_s: float | None = None
        self._is_last_asked = False
        self.was_saved = False
        """Whether a checkpoint that was asked for because of a notice is committed."""

    def hear(self, notice: Notice, now_s: float) -> bool:
        """Take in a notice; return whether it says something new. It may be repeated at will."""
        is_new = notice.source not in self.notices
        self.notices[notice.source] = notice
        if notice.seconds_left is None:
            return is_new
        if notice.node:
            is_new |= notice.node not in self.going
            self.going.add(notice.node)
        deadline_s = now_s + notice.seconds_left
        if self.deadline_s is None or deadline_s < self.deadline_s - SAME_DEADLINE_S:
            self.deadline_s = deadline_s
            self._is_last_asked = False
            return True
        return is_new

    def is_due(self, now_s: float, *, persist_s: float, step_s: float) -> bool:
        """Return whether to ask for a checkpoint now; each of the two is asked for once.

        Where nobody could ask in time, the last one comes late: the end may do so as well.

        Args:
            now_s: The time.
            persist_s: As in `last_start_s`.
            step_s: As in `last_start_s`.
        """
        if not self.notices:
            return False
        if self._first_asked_s is None:
            self._first_asked_s = now_s
            return True
        if self.deadline_s is None or self._is_last_asked:
            return False
        start_s = last_start_s(self.deadline_s, persist_s=persist_s, step_s=step_s, lead_s=self._lead_s)
        if now_s < start_s:
            return False
        self._is_last_asked = True
        # One while the first is under way would be saved in its place, and too late.
        return start_s - self._first_asked_s >= self._lead_s + 3 * step_s + persist_s

    def committed(self, planned_s: float) -> None:
        """Say that a checkpoint is committed whose plan was made at this time."""
        if self._first_asked_s is not None and planned_s >= self._first_asked_s:
            self.was_saved = True

    def covers(self, lost_s: float) -> bool:
        """Whether a loss at this time is the one that was announced, and cost next to nothing.

        A loss long after the end that was told, or after a mere advice, is one like any other.
        """
        if not self.was_saved or self._first_asked_s is None:
            return False
        end_s = self.deadline_s if self.deadline_s is not None else self._first_asked_s
        return lost_s <= end_s + LATE_S
