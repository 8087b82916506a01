"""What steps, checkpoints and restarts cost, learnt from a running job.

Numbers arrive as they are measured; every estimate forgets outliers and
follows a lasting change, up or down, within a few observations. Nothing here
reads a clock. Each class serves one job and one thread.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque

from raycheck.core.efficiency import check
from raycheck.core.interval import Costs
from raycheck.core.overlap import OverlapRun, OverlapTracker

DEFAULT_RESTART_S = 30.0
"""Until this run has restarted. It enters predictions only, never the interval."""

_WINDOW = 32
_TAIL = 0.95
# After this many observations beyond all earlier ones, by this ratio, the earlier ones are history.
_CHANGES = ((2, 2.0), (3, 1.25))

# Shards of one layout differ by less than this from one checkpoint to the next.
_OTHER_BYTES = 1.1

_FIRST_LEAST_S, _FIRST_MOST_S, _FIRST_STEPS = 10.0, 60.0, 10


def first_checkpoint_after_s(step_s: float) -> float:
    """Return how long to train before the first checkpoint, seconds.

    Nothing is known of its cost, and until it is durable all work is exposed:
    ten steps, so that their time is known, but 10 s at least and a minute at
    most, and never within the first step.
    """
    _check("step_s", step_s)
    return max(step_s, min(max(_FIRST_STEPS * step_s, _FIRST_LEAST_S), _FIRST_MOST_S))


class CostEstimator:
    """Estimates `Costs`.

    Args:
        restart_s: Seconds from a failure to the first new step, if the user
            said so. None: measured.
    """

    def __init__(self, *, restart_s: float | None = None) -> None:
        if restart_s is not None:
            _check("restart_s", restart_s)
        self._given_restart_s = restart_s
        self._restarts_s: deque[float] = deque(maxlen=8)
        self._steps = OverlapTracker()
        self._is_first_step = True
        self._num_checkpoints = 0
        self._stall = _Window()
        self._persist = _Window()
        self._slowdown = _Window()
        self._first: tuple[float, float] | None = None
        self._bytes_per_rank: float | None = None
        self._unpaired_run: OverlapRun | None = None
        self._unpaired_persist_s: float | None = None

    def observe_step(self, duration_s: float, *, overlapped: bool, stall_s: float = 0.0) -> None:
        """Take in one step of the rank that is furthest ahead.

        The first step ever is left out: it compiles and warms up.

        Args:
            duration_s: From the end of the previous ``step()`` to the end of
                this one, seconds.
            overlapped: Whether a copy or a persist was under way in it. Then it
                does not tell the free step time.
            stall_s: What of ``duration_s`` we blocked the training thread.

        Raises:
            ValueError: If a number is negative or not finite; it is named.
        """
        _check("duration_s", duration_s)
        _check("stall_s", stall_s)
        if self._is_first_step:
            self._is_first_step = False
            return
        num_runs = self._steps.num_runs
        run, _ = self._steps.add(max(duration_s - stall_s, 0.0), overlapped=overlapped)
        if run is not None:
            self._unpaired_run = run
            self._pair()
        if self._steps.num_runs > num_runs:
            # Whatever waits now belongs to an attempt that never became a checkpoint.
            self._unpaired_run = self._unpaired_persist_s = None

    @property
    def bytes_per_rank(self) -> float | None:
        """What the rank that writes most writes, bytes, as measured or expected. None: unknown."""
        return self._bytes_per_rank

    def observe_checkpoint(
        self, *, stall_s: float, persist_s: float, bytes_per_rank: float | None = None
    ) -> None:
        """Take in one committed checkpoint.

        The first one counts only until there is a second: it touches memory and
        opens connections for the first time. Costs of earlier ones are scaled
        when the bytes turn out to be others, as after a resize or when layers
        are frozen.

        Args:
            stall_s: Training time blocked, of the rank that was blocked longest.
            persist_s: From snapshot to durable, of the slowest rank.
            bytes_per_rank: What the rank that wrote most wrote. None: not known.

        Raises:
            ValueError: If a number is negative or not finite; it is named.
        """
        _check("stall_s", stall_s)
        _check("persist_s", persist_s)
        if bytes_per_rank:
            _check("bytes_per_rank", bytes_per_rank)
            self._expect_bytes(bytes_per_rank)
        self._num_checkpoints += 1
        if self._num_checkpoints == 1:
            self._first = (stall_s, persist_s)
        else:
            self._stall.add(stall_s)
            self._persist.add(persist_s)
        self._unpaired_persist_s = persist_s
        self._pair()

    def observe_restart(self, seconds: float) -> None:
        """Take in the time from one failure to the first new step."""
        _check("seconds", seconds)
        self._restarts_s.append(seconds)

    def observe_resize(self, *, bytes_ratio: float) -> None:
        """Tell that the job was resized and each rank is expected to write this many times as many bytes.

        Checkpoint costs are scaled until they are measured again; the step time
        of the old size stands until the new one has been seen. The next
        checkpoint corrects an expectation that was wrong.
        """
        _check("bytes_ratio", bytes_ratio)
        self._rescale(bytes_ratio)
        self._unpaired_run = self._unpaired_persist_s = None
        self._is_first_step = True

    def _expect_bytes(self, bytes_per_rank: float) -> None:
        """Scale costs to bytes as measured, and hold those for known."""
        known = self._bytes_per_rank
        if known and not 1 / _OTHER_BYTES < bytes_per_rank / known < _OTHER_BYTES:
            self._rescale(bytes_per_rank / known)
        self._bytes_per_rank = bytes_per_rank

    def _rescale(self, bytes_ratio: float) -> None:
        self._stall.rescale(bytes_ratio)
        self._persist.rescale(bytes_ratio)
        if self._first is not None:
            self._first = (self._first[0] * bytes_ratio, self._first[1] * bytes_ratio)
        if self._bytes_per_rank is not None:
            self._bytes_per_rank *= bytes_ratio

    def costs(self) -> Costs | None:
        """Return what is known, or None before the first checkpoint and the second step."""
        steps = self._steps.free if len(self._steps.free) else self._steps.overlapped
        if self._first is None or not len(steps):
            return None
        first_stall_s, first_persist_s = self._first
        has_more = len(self._persist) > 0
        return Costs(
            step_s=steps.median_s(),
            stall_s=self._stall.mean() if has_more else first_stall_s,
            persist_s=self._persist.mean() if has_more else first_persist_s,
            persist_tail_s=self._persist.quantile(_TAIL) if has_more else first_persist_s,
            slowdown=max(self._slowdown.mean(), 0.0) if len(self._slowdown) else 0.0,
            restart_s=self._restart_s(),
        )

    def _restart_s(self) -> float:
        if self._given_restart_s is not None:
            return self._given_restart_s
        return statistics.median(self._restarts_s) if self._restarts_s else DEFAULT_RESTART_S

    def _pair(self) -> None:
        """Relate what a run of overlapped steps cost to the persist it overlapped."""
        run, persist_s = self._unpaired_run, self._unpaired_persist_s
        if run is None or persist_s is None:
            return
        self._unpaired_run = self._unpaired_persist_s = None
        if run.is_steady and persist_s > 0:
            self._slowdown.add(run.excess_s / persist_s)


class _Window:
    """The latest values of one cost; drops the old ones when it changes for good."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        for num_new, ratio in _CHANGES:
            if len(self) > num_new and _has_changed(list(self._values), num_new, ratio):
                for _ in range(len(self) - num_new):
                    self._values.popleft()
                return

    def rescale(self, ratio: float) -> None:
        self._values = deque((value * ratio for value in self._values), maxlen=_WINDOW)

    def mean(self) -> float:
        """Return the mean with values far from the median moved to the edge of the others."""
        middle = statistics.median(self._values)
        if len(self) < 3:
            return statistics.fmean(self._values)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in self._values)
        low, high = middle - 3 * spread, middle + 3 * spread
        return statistics.fmean(min(max(value, low), high) for value in self._values)

    def quantile(self, share: float) -> float:
        """Return a quantile, interpolated: with few values close to the highest."""
        ordered = sorted(self._values)
        at = share * (len(ordered) - 1)
        below = math.floor(at)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def _has_changed(values: list[float], num_new: int, ratio: float) -> bool:
    earlier, new = sorted(values[:-num_new]), values[-num_new:]
    if len(earlier) >= 5:
        # One hiccup among the earlier ones must not hide a change behind it.
        earlier = earlier[1:-1]
    middle = statistics.median(earlier)
    is_up = min(new) > earlier[-1] and min(new) > ratio * middle
    is_down = max(new) < earlier[0] and max(new) * ratio < middle
    return is_up or is_down


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredOverhead:
    """What checkpoints really cost training, since the start or in one phase of it."""

    stall_s: float = 0.0
    """Training thread blocked, seconds."""

    slowdown_s: float = 0.0
    """What overlapped steps took longer than the free ones around them, seconds. Below 0 by chance."""

    inside_steps_s: float = 0.0
    """Time inside steps, seconds, without evaluation and other pauses."""

    @property
    def fraction(self) -> float:
        """The overhead: the cost as a fraction of the time inside steps. 0 before the first step."""
        if self.inside_steps_s <= 0:
            return 0.0
        return max(self.stall_s + self.slowdown_s, 0.0) / self.inside_steps_s

    def since(self, earlier: MeasuredOverhead) -> MeasuredOverhead:
        """Return what was added after ``earlier``, for the overhead of one phase."""
        return MeasuredOverhead(
            stall_s=self.stall_s - earlier.stall_s,
            slowdown_s=self.slowdown_s - earlier.slowdown_s,
            inside_steps_s=self.inside_steps_s - earlier.inside_steps_s,
        )


class OverheadMeter:
    """Measures the overhead of one rank from its step records. Constant memory.

    (Direct stalls + for each overlapped step its time beyond the mean of the
    neighbouring free steps) / time inside steps. A run of overlapped steps is
    settled after eight free ones or at the next run. Pauses of five times the
    usual step are left out of both sides, unless they fall on overlapped steps
    more often than chance explains: then they are ours. The first step is left
    out.
    """

    def __init__(self) -> None:
        self._steps = OverlapTracker()
        self._is_first_step = True
        self._stall_s = 0.0
        self._slowdown_s = 0.0
        self._inside_steps_s = 0.0

    def observe_step(self, duration_s: float, *, overlapped: bool, stall_s: float = 0.0) -> None:
        """Take in one step, measured as for `CostEstimator.observe_step`."""
        _check("duration_s", duration_s)
        _check("stall_s", stall_s)
        if self._is_first_step:
            self._is_first_step = False
            return
        run, inside_s = self._steps.add(max(duration_s - stall_s, 0.0), overlapped=overlapped)
        if run is not None:
            self._slowdown_s += run.excess_s
        self._stall_s += stall_s
        self._inside_steps_s += inside_s + stall_s

    def measured(self) -> MeasuredOverhead:
        """Return the overhead so far."""
        pauses_s = self._steps.attributed_pauses_s()
        return MeasuredOverhead(
            stall_s=self._stall_s,
            slowdown_s=self._slowdown_s + pauses_s,
            inside_steps_s=self._inside_steps_s + pauses_s,
        )


def _check(name: str, value: float) -> None:
    check(name, value)
    if math.isinf(value):
        raise ValueError(f"{name}={value!r}: must be finite")
