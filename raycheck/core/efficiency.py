"""The formulas of checkpointing under failures: best interval, efficiency, overhead.

Young 1974, "A first order approximation to the optimum checkpoint interval";
Daly 2006, "A higher order estimate of the optimum checkpoint interval for
restart dumps". Nothing here is ever NaN: zero and infinity are inputs like any
other, negative numbers and NaN are refused.
"""

from __future__ import annotations

import math


def one_plus_w0(x: float) -> float:
    """Return ``1 + W0(-exp(-1 - x))`` for ``x >= 0``, to about 1e-12 relative.

    W0 is the main branch of Lambert's function. The argument nears its branch
    point as ``x`` nears 0, where forming it first would lose half the digits.
    """
    check("x", x)
    # Series at the branch point (Corless et al. 1996), in p = sqrt(2(1 + e·z)).
    p = math.sqrt(2.0 * abs(math.expm1(-x)))
    u = p * (1 - p * (1 / 3 - p * (11 / 72 - p * (43 / 540 - p * (769 / 17280 - p * 221 / 8505)))))
    if p < 1e-2:
        return u
    # Newton on w·exp(w) = -exp(-1-x) with v = -w in (0, 1), in logarithms.
    v = min(max(1.0 - u, 1e-300), math.exp(-x)) if x < 1 else math.exp(-1 - x)
    for _ in range(50):
        if v == 0.0:
            return 1.0
        change = (math.log(v) - v + 1.0 + x) / (1.0 / v - 1.0)
        v -= change
        if abs(change) <= 1e-16 * v:
            break
    return 1.0 - v


def best_interval_s(checkpoint_s: float, mttf_s: float) -> float:
    """Return the interval with the highest ETTR, seconds of training between snapshots.

    To first order ``sqrt(2 · checkpoint_s · mttf_s)``; never more than ``mttf_s``.
    Infinite when the job never fails and checkpoints cost something, 0 when they are free.

    Raises:
        ValueError: If an input is negative or not a number.
    """
    check("checkpoint_s", checkpoint_s)
    check("mttf_s", mttf_s)
    if checkpoint_s == 0.0 or mttf_s == 0.0:
        return 0.0
    if mttf_s == math.inf:
        return math.inf
    return mttf_s * one_plus_w0(checkpoint_s / mttf_s)


def ettr(
    interval_s: float, *, checkpoint_s: float, persist_s: float, restart_s: float, mttf_s: float
) -> float:
    """Return the expected share of wall time that becomes lasting progress, in [0, 1].

    Exact for exponential failures that strike in training and in restarts
    alike, but for the exposure while the previous persist is running.

    Raises:
        ValueError: If an input is negative or not a number.
    """
    for name, value in (
        ("interval_s", interval_s),
        ("checkpoint_s", checkpoint_s),
        ("persist_s", persist_s),
        ("restart_s", restart_s),
        ("mttf_s", mttf_s),
    ):
        check(name, value)
    if checkpoint_s == math.inf or mttf_s == 0.0:
        return 0.0
    if checkpoint_s == 0.0 or interval_s == math.inf:
        kept = 1.0
    else:
        kept = interval_s / (interval_s + checkpoint_s)
    if mttf_s == math.inf:
        return kept if persist_s + restart_s < math.inf else 0.0
    return kept * _decay((interval_s + checkpoint_s) / mttf_s) * math.exp(-(persist_s + restart_s) / mttf_s)


def overhead(interval_s: float, checkpoint_s: float) -> float:
    """Return the cost of checkpoints as a fraction of training time."""
    if checkpoint_s == 0.0:
        return 0.0
    if checkpoint_s == math.inf or interval_s == 0.0:
        return math.inf
    return checkpoint_s / interval_s


def _decay(x: float) -> float:
    """Return ``x / (exp(x) - 1)``: 1 at 0, 0 at infinity."""
    if x > 700.0:
        return 0.0
    return x / math.expm1(x) if x > 0.0 else 1.0


def times(a: float, b: float) -> float:
    """Multiply, with zero times infinity being zero: what does not happen costs nothing."""
    return 0.0 if a == 0.0 or b == 0.0 else a * b


def check(name: str, value: float, *, zero: bool = True) -> None:
    """Raise ValueError naming a value that is negative, NaN, or 0 unless ``zero``."""
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name}={value!r}: must be a number {'at least' if zero else 'above'} 0")
