"""How fast steps go by, from when they were seen."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 30.0
_APART_S = 0.5
_NUM_AT_LEAST = 3


class Pace:
    """Steps a second of late: over half a minute, or over the last steps if they are longer than that.

    Not thread-safe. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque()

    @property
    def step(self) -> int | None:
        """The newest step that was seen."""
        return self._seen[-1][0] if self._seen else None

    @property
    def step_seen_s(self) -> float | None:
        """When it was first seen."""
        return self._seen[-1][1] if self._seen else None

    def observe(self, step: int, now_s: float) -> None:
        """Take in that a step was seen; one that is not newer than those before changes nothing."""
        seen = self._seen
        if seen and step <= seen[-1][0]:
            return
        if len(seen) > 1 and seen[-1][1] - seen[-2][1] < _APART_S:
            seen.pop()
        seen.append((step, now_s))
        while len(seen) > _NUM_AT_LEAST and seen[1][1] < now_s - _WINDOW_S:
            seen.popleft()

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the pace; None before there are two steps. It falls while no further step is seen."""
        # A copy, since people ask from another thread.
        seen = list(self._seen)
        if len(seen) < 2:
            return None
        (first, first_s), (last, last_s) = seen[0], seen[-1]
        if last_s <= first_s:
            return None
        step_s = (last_s - first_s) / (last - first)
        # That the next step is on its way is no sign of a slower pace; that it is late is one.
        late_s = max(now_s - last_s - 2 * step_s, 0.0)
        return (last - first) / (last_s - first_s + late_s)
