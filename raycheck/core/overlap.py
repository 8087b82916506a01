"""What background work costs the steps that run beside it.

Steps are told apart by whether a copy or a persist was under way. What a run of
such steps took longer than the free steps before and after it is its excess.
Medians would hide a step that is slow every tenth time, and a plain mean would
charge us with an evaluation that happened to fall into an upload. So the free
time is a mean without pauses, and pauses are counted apart.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque

PAUSE_FACTOR = 5.0
"""A step this many times as long as usual is a pause: an evaluation, a hiccup."""

_WINDOW_STEPS = 64
_RECENT_STEPS = 8
_CHANGED_STEPS = 7
_CHANGED_RATIO = 1.2
_USUAL_STEPS = 9
_STEPS_AFTER = 8


class StepWindow:
    """The latest durations of like steps; forgets the old ones when they change for good.

    Not confused by single outliers: seven of the latest eight steps must lie
    outside the middle half of the earlier ones, on one side.
    """

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=_WINDOW_STEPS)

    def __len__(self) -> int:
        return len(self._durations_s)

    def add(self, duration_s: float) -> None:
        """Take one duration in."""
        self._durations_s.append(duration_s)
        if len(self) >= 2 * _RECENT_STEPS and self._has_changed():
            for _ in range(len(self) - _RECENT_STEPS):
                self._durations_s.popleft()

    def median_s(self) -> float:
        """Return the median, seconds. There must be a duration."""
        return statistics.median(self._durations_s)

    def usual_s(self) -> float:
        """Return the median of the latest few, which follows a change soonest."""
        durations_s = self._durations_s
        return statistics.median(
            durations_s[i] for i in range(max(len(durations_s) - _USUAL_STEPS, 0), len(durations_s))
        )

    def mean_s(self) -> float:
        """Return the mean without pauses, seconds."""
        limit_s = PAUSE_FACTOR * self.median_s()
        return statistics.fmean(duration_s for duration_s in self._durations_s if duration_s <= limit_s)

    def _has_changed(self) -> bool:
        durations_s = list(self._durations_s)
        earlier, recent = sorted(durations_s[:-_RECENT_STEPS]), durations_s[-_RECENT_STEPS:]
        low_s, high_s = earlier[len(earlier) // 4], earlier[-1 - len(earlier) // 4]
        num_above = sum(duration_s > high_s for duration_s in recent)
        num_below = sum(duration_s < low_s for duration_s in recent)
        if max(num_above, num_below) < _CHANGED_STEPS:
            return False
        before_s, now_s = statistics.median(earlier), statistics.median(recent)
        return max(before_s, now_s) > _CHANGED_RATIO * min(before_s, now_s)


@dataclasses.dataclass(frozen=True, slots=True)
class OverlapRun:
    """A run of overlapped steps between free ones."""

    num_steps: int
    excess_s: float
    """What they took longer than free steps, seconds. Below 0 by chance."""

    is_steady: bool
    """Whether the free steps before and after it took alike, so that the excess means something."""


@dataclasses.dataclass(slots=True)
class PauseCount:
    """Steps and pauses of one sort."""

    num_steps: int = 0
    num_pauses: int = 0
    excess_s: float = 0.0


class OverlapTracker:
    """Cuts the stream of steps into runs and finds what each cost. Constant memory.

    Durations are without stalls, which are known by themselves.
    """

    def __init__(self) -> None:
        self.free = StepWindow()
        self.overlapped = StepWindow()
        self.free_pauses = PauseCount()
        self.overlapped_pauses = PauseCount()
        self.num_runs = 0
        self._is_open = False
        self._num_steps = 0
        self._total_s = 0.0
        self._before_s: float | None = None
        self._after_s: list[float] = []

    def add(self, duration_s: float, *, overlapped: bool) -> tuple[OverlapRun | None, float]:
        """Take one step in.

        Returns:
            A run, once enough free steps have followed it or the next has
            begun; and the step's duration, a pause cut down to the usual time.
        """
        run = self._add_overlapped() if overlapped else None
        duration_s, is_pause = self._cut(duration_s, overlapped=overlapped)
        if overlapped:
            if not is_pause:
                self._num_steps += 1
                self._total_s += duration_s
        elif self._is_open:
            self._after_s.append(duration_s)
            if len(self._after_s) == _STEPS_AFTER:
                run = self._end_run()
        return run, duration_s

    def attributed_pauses_s(self) -> float:
        """Return what pauses in overlapped steps cost beyond chance, seconds.

        A pause is ours only if pauses fall on overlapped steps more often than
        one time in a hundred by chance; then for all they exceed the free ones.
        """
        ours, free = self.overlapped_pauses, self.free_pauses
        if not ours.num_pauses or not free.num_steps:
            return 0.0
        share = ours.num_steps / (ours.num_steps + free.num_steps)
        if _binomial_tail(ours.num_pauses, ours.num_pauses + free.num_pauses, share) > 0.01:
            return 0.0
        return max(ours.excess_s - free.excess_s / free.num_steps * ours.num_steps, 0.0)

    def _add_overlapped(self) -> OverlapRun | None:
        """Begin a run if none is open; return the one before it if that was still waiting."""
        run = self._end_run() if self._after_s else None
        if not self._is_open:
            self._is_open = True
            self._before_s = self.free.mean_s() if len(self.free) else None
            self.num_runs += 1
        return run

    def _cut(self, duration_s: float, *, overlapped: bool) -> tuple[float, bool]:
        window = self.overlapped if overlapped else self.free
        count = self.overlapped_pauses if overlapped else self.free_pauses
        known = [w.usual_s() for w in (self.free, window) if len(w)]
        window.add(duration_s)
        count.num_steps += 1
        if not known or duration_s <= PAUSE_FACTOR * max(known):
            return duration_s, False
        count.num_pauses += 1
        count.excess_s += duration_s - max(known)
        return max(known), True

    def _end_run(self) -> OverlapRun | None:
        before_s, after_s = self._before_s, self._after_s
        num_steps, total_s = self._num_steps, self._total_s
        self._is_open, self._num_steps, self._total_s, self._after_s = False, 0, 0.0, []
        sides_s = [before_s] if before_s is not None else []
        if after_s:
            sides_s.append(statistics.fmean(after_s))
        if not sides_s:
            return None
        is_steady = max(sides_s) <= _CHANGED_RATIO * min(sides_s)
        return OverlapRun(num_steps, total_s - num_steps * statistics.fmean(sides_s), is_steady)


def _binomial_tail(at_least: int, num: int, share: float) -> float:
    """Return the probability of ``at_least`` or more out of ``num``."""
    if share >= 1.0:
        return 1.0
    log_share, log_rest = math.log(share), math.log1p(-share)
    log_num = math.lgamma(num + 1)
    return math.fsum(
        math.exp(
            log_num - math.lgamma(k + 1) - math.lgamma(num - k + 1) + k * log_share + (num - k) * log_rest
        )
        for k in range(at_least, num + 1)
    )
