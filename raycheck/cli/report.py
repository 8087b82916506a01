"""``raycheck report``: what a run did and where its time went, as one HTML file."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from raycheck.cli.access import OptionsOption, RunArgument, open_run, reported
from raycheck.core.layout import ROOT
from raycheck.errors import ConfigError


def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write it. Default: NAME-report.html here."
        ),
    ] = None,
    options: OptionsOption = "{}",
) -> None:
    """Make one HTML file that shows what a run did and where its time went.

    From the run's records and telemetry: steps, failures and restarts on one axis of time, the interval and its
    reasons, the overhead against its bound, losses, stalls and uploads. The file needs nothing but a browser. Works
    while the run is going on. A file of that name is replaced.

    Exit codes: 0 written; 2 the run cannot be read, or the file not written.

    Examples:
        raycheck report s3://bucket/runs/gpt
        raycheck report /data/runs/gpt --output gpt.html
    """
    # Jinja takes a while to import: not for the help.
    from raycheck.observe.report import make_page, read_run

    with reported("report"):
        found = read_run(open_run(run, options), _name(run))
        path = output or Path(f"{_safe(found.name)}-report.html")
        page = make_page(found)
        _write(path, page)
    typer.echo(
        f"{path}: {len(found.starts):,} generations, {len(found.events):,} events, {len(page) / 1e6:.2g} MB"
    )
    if not found.events:
        typer.echo("this run has no telemetry: the report is from its records alone", err=True)


def _name(run: str) -> str:
    """Return the run's name as its folder or URL has it."""
    parts = [part for part in run.partition("?")[0].rstrip("/").split("/") if part]
    if len(parts) > 1 and parts[-1] == ROOT:
        parts.pop()
    return parts[-1] if parts and not parts[-1].endswith(":") else "run"


def _safe(name: str) -> str:
    """Return a name that is one of a file anywhere."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".-")[:100] or "run"


def _write(path: Path, page: bytes) -> None:
    """Write a file, whole or not at all.

    Raises:
        ConfigError: If it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        temporary.write_bytes(page)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(
            f"--output: {path} cannot be written: {error.strerror}; give a file in a folder that exists",
            field="output",
            value=str(path),
        ) from error
