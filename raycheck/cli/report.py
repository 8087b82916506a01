"""``raycheck report``: what a run did and where its time went, as one HTML file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from raycheck.cli.access import OptionsOption, RunArgument, open_run, reported
from raycheck.core.accounting import account
from raycheck.core.layout import ROOT
from raycheck.core.time_spent import Losses, RunAccount
from raycheck.errors import ConfigError


def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write it. Default: NAME-report.html here."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print where the time went as JSON; write no file.")
    ] = False,
    options: OptionsOption = "{}",
) -> None:
    """Make one HTML file that shows what a run did and where its time went.

    From the run's records and telemetry: steps, failures and restarts on one axis of time, the interval and its
    reasons, the overhead against its bound, losses, stalls and uploads. The file needs nothing but a browser. Works
    while the run is going on. A file of that name is replaced.

    Exit codes: 0 written; 2 the run cannot be read, or the file not written.

    Examples:
        raycheck report s3://bucket/runs/gpt
        raycheck report s3://bucket/runs/gpt --json | jq .losses
        raycheck report /data/runs/gpt --output gpt.html
    """
    # Jinja takes a while to import: not for the help.
    from raycheck.observe.report import make_page, read_run

    if as_json and output is not None:
        raise typer.BadParameter("--json prints, --output writes a page: give one of the two")
    with reported("report"):
        found = read_run(open_run(run, options), _name(run))
        if as_json:
            typer.echo(json.dumps(_to_json(found.name, account(found.starts, found.events)), indent=2))
            return
        path = output or Path(f"{_safe(found.name)}-report.html")
        page = make_page(found)
        _write(path, page)
    typer.echo(
        f"{path}: {len(found.starts):,} generations, {len(found.events):,} events, {len(page) / 1e6:.2g} MB"
    )
    if not found.events:
        typer.echo("this run has no telemetry: the report is from its records alone", err=True)


def _to_json(name: str, run: RunAccount) -> dict[str, Any]:
    """Return where a run's time went as plain values; times in seconds, dates in seconds since 1970."""
    return {
        "name": name,
        "begin_unix_s": run.begin_unix_s,
        "end_unix_s": run.end_unix_s,
        "reached_step": run.reached_step,
        "num_failures": run.num_failures,
        "overhead": run.overhead,
        "max_overhead": run.max_overhead,
        "losses": _losses_json(run.losses),
        "generations": [
            {
                "generation": str(each.start.generation),
                "world_size": each.start.world_size,
                "restored_step": each.restored_step,
                "reached_step": each.reached_step,
                "left_at_step": each.left_at_step,
                "steps_lost": each.steps_lost,
                "ending": each.ending,
                "failure_kinds": list(each.failure_kinds),
                "num_checkpoints": each.num_checkpoints,
                "num_attempts": len(each.attempts),
                "losses": _losses_json(each.losses),
            }
            for each in run.generations
        ],
    }


def _losses_json(losses: Losses) -> dict[str, float | None]:
    return {**dataclasses.asdict(losses), "wall_s": losses.wall_s, "ettr": losses.ettr}


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
