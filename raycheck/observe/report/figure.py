"""Drawing with SVG: axes, lines, bars. Numbers in, markup out; colours are those of the page's style sheet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup, escape

Point = tuple[float, float]

WIDE, HALF, NARROW = 1040, 506, 350
"""Widths that figures are drawn in, pixels: letters do not scale, so a phone gets figures of its own."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 38
_TIME_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_TIME_STEPS_S = (
    *(10.0**e * m for e in range(-3, 1) for m in (1, 2, 5)),
    *(10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0),
    *(3600.0 * h for h in (1, 2, 3, 6, 12)),
    *(86_400.0 * 10.0**e * m for e in range(5) for m in (1, 2, 5)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """From values to pixels: linear, or logarithmic."""

    low: float
    high: float
    begin: float
    """The pixel of the low end."""

    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value; of one outside, the nearest end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def both_widths(draw: Callable[[int], Markup], wide: int = WIDE) -> Markup:
    """Return a figure in both widths; the style sheet shows one of them."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(draw(wide), draw(NARROW))


class Plot:
    """A frame with an axis of values on the left and one below.

    Args:
        width: Of the whole figure, pixels.
        height: Likewise.
        label: What the figure shows, in a sentence, for those who do not see it.
        x_range: Lowest and highest value.
        y_range: Likewise.
        is_x_log: Whether the axis below is logarithmic.
        is_y_log: Whether the one on the left is.
    """

    def __init__(
        self,
        width: int,
        height: int,
        label: str,
        x_range: Point,
        y_range: Point,
        *,
        is_x_log: bool = False,
        is_y_log: bool = False,
    ) -> None:
        self._width, self._height, self._label = width, height, label
        self.x = Axis(*_widened(x_range, is_x_log), _LEFT, width - _RIGHT, is_x_log)
        self.y = Axis(*_widened(y_range, is_y_log), height - _BOTTOM, _TOP, is_y_log)
        self._parts: list[Markup] = []

    def axes(
        self,
        x_ticks: Iterable[tuple[float, str]],
        y_ticks: Iterable[tuple[float, str]],
        x_title: str = "",
    ) -> None:
        """Draw lines across for values, and names for both axes' values."""
        for value, text in y_ticks:
            y = self.y.at(value)
            self._line(self.x.begin, y, self.x.end, y, "grid")
            self._text(self.x.begin - 6, y + 4, text, "end")
        bottom = self.y.begin
        self._line(self.x.begin, bottom, self.x.end, bottom, "axis")
        for value, text in x_ticks:
            x = self.x.at(value)
            self._line(x, bottom, x, bottom + 4, "axis")
            self._text(x, bottom + 17, text, "middle")
        self._text(self.x.end, bottom + 32, x_title, "end")

    def verticals(self, values: Iterable[float], kind: str) -> None:
        """Draw lines from top to bottom."""
        for value in values:
            x = self.x.at(value)
            self._line(x, self.y.end, x, self.y.begin, kind)

    def reference(self, value: float, text: str) -> None:
        """Draw a dashed line across, with its name."""
        y = self.y.at(value)
        self._line(self.x.begin, y, self.x.end, y, "reference")
        self._text(self.x.end - 2, y - 5, text, "end")

    def line(self, points: Sequence[Point], kind: str, *, is_stepped: bool = False) -> None:
        """Draw a line through points that are in the order of the axis below."""
        thinned = thin(points, self.x.low, self.x.high, round(self.x.end - self.x.begin))
        pixels = [(self.x.at(x), self.y.at(y)) for x, y in thinned]
        if len(pixels) < 2:
            self.dots(thinned, kind)
            return
        pieces = [f"M{pixels[0][0]:.1f} {pixels[0][1]:.1f}"]
        for x, y in pixels[1:]:
            pieces.append(f"H{x:.1f}V{y:.1f}" if is_stepped else f"L{x:.1f} {y:.1f}")
        self._add('<path class="line {}" d="{}"/>', kind, "".join(pieces))

    def dots(self, points: Sequence[Point], kind: str) -> None:
        """Draw a dot for each point; points that would lie on one another are one."""
        seen = {(round(self.x.at(x)), round(self.y.at(y))) for x, y in points}
        path = "".join(f"M{x} {y}h.01" for x, y in sorted(seen))
        if path:
            self._add('<path class="dots {}" d="{}"/>', kind, path)

    def bar(self, begin: float, end: float, value: float, kind: str, title: str) -> None:
        """Draw a bar that stands on the axis below."""
        left, right, top = self.x.at(begin), self.x.at(end), self.y.at(value)
        self._add(
            '<rect class="{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
            kind,
            f"{left + 0.5:.1f}",
            f"{top:.1f}",
            f"{max(right - left - 1, 1):.1f}",
            f"{self.y.begin - top:.1f}",
            title,
        )

    def markup(self) -> Markup:
        """Return what has been drawn."""
        return Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>').format(
            self._label, self._width, self._height, Markup("").join(self._parts)
        )

    def _add(self, template: str, *values: object) -> None:
        self._parts.append(Markup(template).format(*values))

    def _line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        ends = (f"{value:.1f}" for value in (x1, y1, x2, y2))
        self._add('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>', kind, *ends)

    def _text(self, x: float, y: float, text: str, anchor: str) -> None:
        if text:
            self._add(
                '<text x="{}" y="{}" text-anchor="{}">{}</text>', f"{x:.1f}", f"{y:.1f}", anchor, escape(text)
            )


def _widened(range_: Point, is_log: bool) -> Point:
    low, high = range_
    if is_log:
        low = max(low, 1e-9)
        return (low, high) if high > low * 1.01 else (low / 2, low * 2)
    return (low, high) if high > low else (low, low + 1.0)


def thin(points: Sequence[Point], low: float, high: float, num_columns: int) -> list[Point]:
    """Return the points that make the same picture: per column the first, lowest, highest and last."""
    if len(points) <= 4 * num_columns:
        return list(points)
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(int((point[0] - low) / (high - low) * num_columns), []).append(point)
    kept: list[Point] = []
    for column in columns.values():
        by_value = sorted(column, key=lambda point: point[1])
        kept += sorted({column[0], by_value[0], by_value[-1], column[-1]})
    return sorted(kept, key=lambda point: point[0])


def time_ticks(length_s: float, most: int) -> list[tuple[float, str]]:
    """Return round times from 0 to a length, seconds, with their names; at most so many, and 0."""
    step_s = next((s for s in _TIME_STEPS_S if length_s / s <= most), length_s / most or 1.0)
    unit_s, unit = next(((s, name) for s, name in _TIME_UNITS if step_s >= s), (1.0, "s"))
    return [
        (i * step_s, f"{i * step_s / unit_s:.6g} {unit}" if i else "0")
        for i in range(int(length_s / step_s * 1.000001) + 1)
    ]


def linear_ticks(high: float, most: int = 5) -> list[float]:
    """Return round values from 0 to about ``high``."""
    if high <= 0:
        return [0.0]
    rough = high / most
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    return [i * step for i in range(int(high / step * 1.000001) + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values within a range, at most so many: the finest that are few enough."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**e for e in decades for f in factors if low <= f * 10.0**e <= high * 1.000001]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]
