"""How commands show tables and progress: for people on a terminal, plain elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from raycheck.cli.units import bytes_text
from raycheck.core.inventory import State

STATE_STYLES: dict[State, str] = {
    "usable": "green",
    "registered": "green",
    "fenced": "dim",
    "incomplete": "yellow",
    "damaged": "bold red",
    "damaged-size": "bold red",
}

_PLAIN_EVERY_S = 10.0


class Listing:
    """Rows under headings: a table on a terminal, aligned columns without lines elsewhere.

    Args:
        headings: One that begins with ">" is of a column of numbers.
    """

    def __init__(self, *headings: str) -> None:
        self._is_right = [heading.startswith(">") for heading in headings]
        self._headings = [heading.removeprefix(">") for heading in headings]
        self._rows: list[tuple[Sequence[str], str]] = []

    def add(self, *cells: str, style: str = "") -> None:
        """Add a row; the style is for terminals."""
        self._rows.append((cells, style))

    def print(self) -> None:
        """Print it to standard output."""
        console = Console()
        if console.is_terminal:
            console.print(self._table())
        else:
            for cells in ([*self._headings], *(cells for cells, _ in self._rows)):
                typer.echo(self._line(cells))

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE, padding=(0, 1))
        for heading, is_right in zip(self._headings, self._is_right, strict=True):
            table.add_column(heading, justify="right" if is_right else "left")
        for cells, style in self._rows:
            table.add_row(*cells, style=style)
        return table

    def _line(self, cells: Sequence[str]) -> str:
        columns = zip(self._headings, *(cells for cells, _ in self._rows), strict=True)
        widths = [max(map(len, column)) for column in columns]
        texts = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, self._is_right, strict=True)
        ]
        return "  ".join(texts).rstrip()


class ByteProgress:
    """How far a transfer is, on standard error: a bar on a terminal, a line now and then elsewhere.

    Args:
        what: What is going on.
        total_bytes: How much there is to do, about.
        is_quiet: Show nothing.
    """

    def __init__(self, what: str, total_bytes: int, *, is_quiet: bool = False) -> None:
        self._what = what
        self._total_bytes = max(total_bytes, 1)
        self._done_bytes = 0
        self._started_s = self._told_s = time.monotonic()
        self._lock = threading.Lock()
        self._is_quiet = is_quiet
        self._bar: Progress | None = None
        console = Console(file=sys.stderr)
        if console.is_terminal and not is_quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(what, total=self._total_bytes)

    def add(self, num_bytes: int) -> None:
        """Count bytes. Thread-safe."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = time.monotonic()
            is_due = now_s - self._told_s >= _PLAIN_EVERY_S
            if is_due:
                self._told_s = now_s
            done_bytes = min(self._done_bytes, self._total_bytes)
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes)
        elif is_due and not self._is_quiet:
            rate = bytes_text(self._done_bytes / (now_s - self._started_s))
            total = bytes_text(self._total_bytes)
            typer.echo(f"{self._what}: {bytes_text(done_bytes)} of {total}, {rate}/s", err=True)

    def __enter__(self) -> ByteProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
