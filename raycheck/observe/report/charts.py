"""The report's figures over time, and its distributions."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from markupsafe import Markup

from raycheck.core.telemetry import Attempt, Reading
from raycheck.core.time_spent import RunAccount
from raycheck.observe.report.figure import HALF, Plot, Point, both_widths, linear_ticks, log_ticks, time_ticks
from raycheck.observe.report.texts import rate_text, share_text, short_s, span_text

_HEIGHT = 250
_X_TITLE = "time since the run began"


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How a measure is distributed."""

    count: int
    median: float
    p95: float
    p99: float
    highest: float


def spread(values: Iterable[float]) -> Spread | None:
    """Return the spread of values; None if there are none. A percentile is one of the values."""
    ordered = sorted(values)
    if not ordered:
        return None

    def percentile(share: float) -> float:
        return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

    return Spread(len(ordered), percentile(0.5), percentile(0.95), percentile(0.99), ordered[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class RankRow:
    """What one rank's snapshots and uploads took."""

    rank: int
    stall: Spread | None
    persist: Spread | None


def rank_rows(attempts: Iterable[Attempt]) -> list[RankRow]:
    """Return the ranks that the telemetry names, those with the longest uploads first."""
    stalls: dict[int, list[float]] = {}
    persists: dict[int, list[float]] = {}
    for attempt in attempts:
        _collect(stalls, attempt.rank_stalls_s)
        _collect(persists, attempt.rank_persists_s)
    rows = [
        RankRow(rank, spread(stalls.get(rank, ())), spread(persists.get(rank, ())))
        for rank in {*stalls, *persists}
    ]
    return sorted(rows, key=lambda row: (-_median(row.persist), -_median(row.stall), row.rank))


def _collect(into: dict[int, list[float]], by_rank: Mapping[int, float]) -> None:
    for rank, seconds in by_rank.items():
        into.setdefault(rank, []).append(seconds)


def _median(of: Spread | None) -> float:
    return of.median if of else 0.0


class TimeCharts:
    """Figures with the run's time below.

    Args:
        account: Of the run.
    """

    def __init__(self, account: RunAccount) -> None:
        self._begin_unix_s = account.begin_unix_s
        self._length_s = max(account.end_unix_s - account.begin_unix_s, 1e-3)
        self._starts_s = [
            generation.spans[0].begin_unix_s - self._begin_unix_s for generation in account.generations[1:]
        ]

    def interval(self, readings: Sequence[Reading]) -> Markup | None:
        """Return the interval over time; None if nothing tells of it."""
        lines = self._lines(readings, lambda reading: reading.interval_s)
        values = [value for line in lines for _, value in line if value > 0]
        if not values:
            return None
        low, high = min(values) / 1.3, max(values) * 1.3

        def draw(width: int) -> Markup:
            label = f"The interval between checkpoints over time: from {short_s(min(values))} to {short_s(max(values))}"
            plot = Plot(width, _HEIGHT, label, (0, self._length_s), (low, high), is_y_log=True)
            self._axes(plot, width, [(tick, short_s(tick)) for tick in log_ticks(low, high)])
            for line in lines:
                plot.line([point for point in line if point[1] > 0], "of-interval", is_stepped=True)
            return plot.markup()

        return both_widths(draw)

    def overhead(self, readings: Sequence[Reading]) -> Markup | None:
        """Return the measured overhead over time, beside its bound; None if nothing tells of it."""
        lines = self._lines(readings, lambda reading: reading.overhead)
        values = [value for line in lines for _, value in line]
        bounds = [reading.max_overhead for reading in readings if reading.max_overhead]
        if not values:
            return None
        high = max([*values, *(bounds[-1:])]) * 1.15 or 0.01

        def draw(width: int) -> Markup:
            label = f"The measured overhead over time: {share_text(values[-1])} at the end"
            plot = Plot(width, _HEIGHT, label, (0, self._length_s), (0, high))
            self._axes(plot, width, [(tick, share_text(tick)) for tick in linear_ticks(high)])
            for line in lines:
                plot.line(line, "of-overhead", is_stepped=True)
            if bounds:
                plot.reference(bounds[-1], f"bound {share_text(bounds[-1])}")
            return plot.markup()

        return both_widths(draw)

    def bandwidth(self, attempts: Sequence[Attempt]) -> Markup | None:
        """Return the rate of each checkpoint's upload; None if there was none."""
        points = [
            (a.ended_unix_s - self._begin_unix_s, a.num_bytes / a.persist_s)
            for a in attempts
            if a.is_committed and a.persist_s > 0 and a.num_bytes
        ]
        if not points:
            return None
        high = max(rate for _, rate in points) * 1.1

        def draw(width: int) -> Markup:
            label = f"The bandwidth of each checkpoint's upload over time, up to {rate_text(high / 1.1)}"
            plot = Plot(width, _HEIGHT, label, (0, self._length_s), (0, high))
            self._axes(plot, width, [(tick, rate_text(tick)) for tick in linear_ticks(high, 4)])
            plot.dots(points, "of-bandwidth")
            return plot.markup()

        return both_widths(draw)

    def _axes(self, plot: Plot, width: int, y_ticks: list[tuple[float, str]]) -> None:
        if len(self._starts_s) <= width / 8:
            plot.verticals(self._starts_s, "restart-line")
        plot.axes(time_ticks(self._length_s, width // 90), y_ticks, _X_TITLE)

    def _lines(
        self, readings: Sequence[Reading], value_of: Callable[[Reading], float | None]
    ) -> list[list[Point]]:
        """Return a line for each writer: what it measures begins anew with it."""
        lines: dict[str, list[Point]] = {}
        for reading in readings:
            value = value_of(reading)
            if value is not None:
                at_s = min(max(reading.unix_s - self._begin_unix_s, 0.0), self._length_s)
                lines.setdefault(reading.writer, []).append((at_s, value))
        return list(lines.values())


def histogram(values_s: Sequence[float], what: str, kind: str) -> Markup | None:
    """Return how often each length of time occurred, in bins that grow with it; None without values above 0."""
    values = sorted(value for value in values_s if value > 0)
    if not values:
        return None
    low, high = values[0] / 1.2, values[-1] * 1.2
    num_bins = min(max(round(math.sqrt(len(values)) * 2), 6), 32)
    edges = [low * (high / low) ** (i / num_bins) for i in range(num_bins + 1)]
    places = [bisect.bisect_left(values, edge) for edge in edges]
    counts = [after - before for before, after in itertools.pairwise(places)]

    def draw(width: int) -> Markup:
        label = f"{what}: {len(values):,} from {short_s(values[0])} to {short_s(values[-1])}"
        plot = Plot(width, 200, label, (low, high), (0, max(counts) * 1.05), is_x_log=True)
        ticks = log_ticks(low, high, 8 if width > 400 else 4)
        whole = sorted({round(tick) for tick in linear_ticks(max(counts), 4)})
        plot.axes([(t, span_text(t)) for t in ticks], [(t, f"{t:,}") for t in whole], what)
        for begin, end, count in zip(edges, edges[1:], counts, strict=False):
            if count:
                title = f"{short_s(begin)} to {short_s(end)}: {count:,}"
                plot.bar(begin, end, count, kind, title)
        return plot.markup()

    return both_widths(draw, HALF)
