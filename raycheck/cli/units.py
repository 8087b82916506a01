"""Sizes, ages and durations as people read and write them."""

from __future__ import annotations

import re

import typer

_BYTE_UNITS = ("kB", "MB", "GB", "TB")
_DURATION_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def bytes_text(num_bytes: float) -> str:
    """Return a size in decimal units, with three digits."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    power = 1
    while power < len(_BYTE_UNITS) and num_bytes >= 999.5 * 1000**power:
        power += 1
    value, unit = num_bytes / 1000**power, _BYTE_UNITS[power - 1]
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"


def age_text(seconds: float | None) -> str:
    """Return how long ago something was, in one unit."""
    if seconds is None:
        return "-"
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit_s:
            return f"{max(seconds, 0) / unit_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``7d``, ``12h``, ``30m`` or ``90s``.

    Raises:
        typer.BadParameter: If it is none.
    """
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw])\s*", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 7d, 12h, 30m or 90s")
    return float(match[1]) * _DURATION_UNITS[match[2]]
