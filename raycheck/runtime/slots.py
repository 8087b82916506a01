"""Which of a worker's arenas the next snapshot goes into."""

from __future__ import annotations


class Slots:
    """The arenas of one worker, and the plans whose snapshots they hold. Used by the training thread.

    Args:
        num_slots: At least 1.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[int, int] = {}
        """By plan id, the oldest first."""

    def take(self, plan_id: int) -> int:
        """Return the slot for a plan: a free one, else that of the oldest plan.

        No more plans than slots are in flight at a time. So where none is free,
        a plan was given up by a coordinator that is gone, which told nobody;
        that one is older than whatever its successor has planned.
        """
        used = self._slots.values()
        free = [slot for slot in range(self._num_slots) if slot not in used]
        slot = free[0] if free else self._slots.pop(next(iter(self._slots)))
        self._slots[plan_id] = slot
        return slot

    def free(self, plan_id: int) -> None:
        """Say that nobody reads a plan's snapshot any more; it may have none."""
        self._slots.pop(plan_id, None)

    def free_all(self) -> None:
        """Say that nobody reads any snapshot any more."""
        self._slots.clear()
