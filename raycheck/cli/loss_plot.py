"""Loss against interval as an SVG file, readable on light and dark pages."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable

from raycheck.core.interval import Costs, Decision, Failures, LossSplit, feasible_interval_s, split_loss
from raycheck.core.interval_text import percent, seconds_text

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 34, 64, 58
_NUM_POINTS = 160

_STYLE = """
svg { --ground: #ffffff; --ink: #1f2328; --faint: #d0d7de; --quiet: #59636e;
  --total: #1f2328; --cost: #0969da; --lost: #bc4c00; --restart: #8250df; --chosen: #1a7f37; }
@media (prefers-color-scheme: dark) { svg { --ground: #0d1117; --ink: #f0f6fc; --faint: #30363d;
  --quiet: #9198a1; --total: #f0f6fc; --cost: #4493f8; --lost: #f0883e; --restart: #ab7df8;
  --chosen: #3fb950; } }
text { font: 12px system-ui, sans-serif; fill: var(--ink); stroke: var(--ground);
  stroke-width: 3px; stroke-linejoin: round; paint-order: stroke; }
.title { font-size: 15px; font-weight: 600; } .quiet { fill: var(--quiet); }
.curve { fill: none; stroke-width: 2; }
"""

_Curve = tuple[str, str, Callable[[LossSplit], float]]
_CURVES: tuple[_Curve, ...] = (
    ("all losses", "total", lambda split: split.total),
    ("checkpoints", "cost", lambda split: split.stall + split.slowdown),
    ("work done again", "lost", lambda split: split.recompute),
    ("restarts", "restart", lambda split: split.restart),
)


class _Axes:
    """Logarithmic axes: data in, pixels out."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_range, self.y_range = x_range, y_range

    def x(self, interval_s: float) -> float:
        return _LEFT + _share(interval_s, self.x_range) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, loss: float) -> float:
        return _HEIGHT - _BOTTOM - _share(loss, self.y_range) * (_HEIGHT - _TOP - _BOTTOM)


def loss_plot_svg(decision: Decision) -> str:
    """Return the plot of a decision that was made with a failure rate and finite costs.

    Raises:
        ValueError: If there is no failure rate, or nothing finite to draw.
    """
    costs, failures = decision.costs, decision.failures
    if failures is None:
        raise ValueError("a plot of the loss needs a failure rate")
    marks = _marks(decision)
    finite = [at_s for _, at_s, _ in marks if 0 < at_s < math.inf]
    if not finite:
        raise ValueError("a plot of the loss needs an interval that is neither 0 nor infinite")
    x_range = (min(finite) / 6, max(finite) * 6)
    intervals_s = _spaced(x_range)
    splits = [split_loss(interval_s, costs, failures) for interval_s in intervals_s]
    losses = [split.total for split in splits if split.total > 0]
    lowest = min(losses, default=1e-3)
    axes = _Axes(x_range, (max(lowest / 8, 1e-7), min(max([*losses, 1e-2]) * 1.2, 1.0)))
    body = [
        *_frame(axes, decision, failures),
        *_curves(axes, intervals_s, splits),
        *_lines(axes, marks),
        *_chosen(axes, decision, costs, failures),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img">\n'
        f"<title>Expected loss against the checkpoint interval</title>\n<style>{_STYLE}</style>\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _marks(decision: Decision) -> list[tuple[str, float, str]]:
    """Vertical lines: label, where, and the side that is ruled out."""
    costs, limits = decision.costs, decision.limits
    marks = [
        ("best", decision.best_interval_s or 0.0, ""),
        ("chosen", decision.interval_s, ""),
        (f"bound {percent(limits.max_overhead)}", costs.checkpoint_s / limits.max_overhead, "left"),
        ("uploads keep up", feasible_interval_s(costs, max_in_flight=limits.max_in_flight), "left"),
    ]
    if limits.recovery_point_s is not None:
        longest_s = limits.recovery_point_s - costs.slow_persist_s - costs.checkpoint_s
        marks.append((f"recovery point {seconds_text(limits.recovery_point_s)}", longest_s, "right"))
    return marks


def _frame(axes: _Axes, decision: Decision, failures: Failures) -> Iterable[str]:
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="var(--ground)"/>'
    term = decision.decided_by.replace("_", " ")
    title = f"{failures.num_gpus:,} GPUs: checkpoint every {seconds_text(decision.interval_s)} ({term})"
    yield _text(_LEFT, 24, title, "title")
    bottom = _HEIGHT - _BOTTOM
    for interval_s in _ticks(axes.x_range):
        x = axes.x(interval_s)
        yield _line(x, _TOP, x, bottom, "faint")
        yield _text(x, bottom + 18, seconds_text(interval_s), "quiet", anchor="middle")
    for loss in _ticks(axes.y_range):
        y = axes.y(loss)
        yield _line(_LEFT, y, _WIDTH - _RIGHT, y, "faint")
        yield _text(_LEFT - 8, y + 4, percent(loss), "quiet", anchor="end")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, "training between checkpoints", anchor="middle")
    yield _text(_LEFT, _TOP - 18, "expected loss of wall time", "quiet")


def _curves(axes: _Axes, intervals_s: list[float], splits: list[LossSplit]) -> Iterable[str]:
    x = float(_WIDTH - _RIGHT - 424)
    for label, colour, part in _CURVES:
        points = [
            f"{axes.x(interval_s):.1f},{axes.y(part(split)):.1f}"
            for interval_s, split in zip(intervals_s, splits, strict=True)
            if axes.y_range[0] <= part(split) <= axes.y_range[1]
        ]
        yield f'<polyline class="curve" stroke="var(--{colour})" points="{" ".join(points)}"/>'
        y = _TOP - 18
        yield f'<line x1="{x}" y1="{y - 4}" x2="{x + 14}" y2="{y - 4}" stroke="var(--{colour})" stroke-width="3"/>'
        yield _text(x + 18, y, label, "quiet")
        x += 40 + 7 * len(label)


def _lines(axes: _Axes, marks: list[tuple[str, float, str]]) -> Iterable[str]:
    bottom = _HEIGHT - _BOTTOM
    for i, (label, at_s, ruled_out) in enumerate(marks):
        if not axes.x_range[0] < at_s < axes.x_range[1] or label == "chosen":
            continue
        x = axes.x(at_s)
        if ruled_out:
            left, right = (_LEFT, x) if ruled_out == "left" else (x, _WIDTH - _RIGHT)
            yield (
                f'<rect x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{bottom - _TOP}" '
                f'fill="var(--quiet)" opacity="0.08"/>'
            )
        yield _line(x, _TOP, x, bottom, "quiet", dashed=True)
        anchor = "end" if x > _WIDTH / 2 else "start"
        yield _text(x + (-5 if anchor == "end" else 5), _TOP + 16 + 16 * i, label, anchor=anchor)


def _chosen(axes: _Axes, decision: Decision, costs: Costs, failures: Failures) -> Iterable[str]:
    if not axes.x_range[0] < decision.interval_s < axes.x_range[1]:
        return
    loss = split_loss(decision.interval_s, costs, failures).total
    x, y = axes.x(decision.interval_s), axes.y(max(loss, axes.y_range[0]))
    colours = 'fill="var(--chosen)" stroke="var(--ground)" stroke-width="2"'
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" {colours}/>'
    anchor = "end" if x > 0.7 * _WIDTH else "start"
    label = f"chosen: {seconds_text(decision.interval_s)}, loss {percent(loss)}"
    yield _text(x + (-10 if anchor == "end" else 10), y - 12, label, anchor=anchor)


def _share(value: float, span: tuple[float, float]) -> float:
    low, high = span
    return math.log(min(max(value, low), high) / low) / math.log(high / low)


def _spaced(span: tuple[float, float]) -> list[float]:
    low, high = span
    return [low * (high / low) ** (i / (_NUM_POINTS - 1)) for i in range(_NUM_POINTS)]


def _ticks(span: tuple[float, float]) -> list[float]:
    low, high = span
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high < 1000 * low else (1,)
    ticks = [digit * 10.0**exponent for exponent in exponents for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html.escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="var(--{colour})"{dash}/>'
