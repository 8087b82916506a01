"""``raycheck audit``: was every item consumed exactly once per epoch?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from raycheck.core.audit import EpochAudit, LoaderAudit, Stretch
from raycheck.core.audit import audit as audit_stretches
from raycheck.core.layout import ROOT
from raycheck.errors import ConfigError, RaycheckError
from raycheck.observe.lineage import History, read_history
from raycheck.store.objects import Store
from raycheck.store.run import RunStore

CLEAN, UNCLEAN, UNKNOWN = 0, 1, 2


def audit(
    run: Annotated[str, typer.Argument(help="The run's folder or URL: storage path and run name.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    options: Annotated[
        str, typer.Option("--storage-options", help="Options of the file system, as a JSON object.")
    ] = "{}",
) -> None:
    """Prove from a run's telemetry which items each epoch consumed.

    Counts what the surviving lineage consumed, over all restarts and world sizes: a step that was lost with a
    failure and taken again counts once. Works while the run is going on, up to its newest checkpoint.

    Exit codes: 0 every item was consumed exactly once; 1 there are duplicates or gaps; 2 it cannot be told, since
    nothing or not everything is known (also wrong arguments and a store that cannot be read).
    """
    try:
        history = _read(run, options)
    except RaycheckError as error:
        typer.echo(f"raycheck audit: {error}", err=True)
        raise typer.Exit(UNKNOWN) from error
    loaders = audit_stretches(history.stretches)
    reasons = _unknown(history, loaders)
    code = _code(loaders, is_known=not reasons)
    if as_json:
        typer.echo(json.dumps(_to_json(run, history, loaders, reasons, code), indent=2))
    else:
        _print(Console(), history, loaders, reasons, code)
    raise typer.Exit(code)


def _code(loaders: Sequence[LoaderAudit], *, is_known: bool) -> int:
    """Return the exit code. What nobody knows of may fill a gap; it cannot undo a duplicate."""
    epochs = [epoch for loader in loaders for epoch in loader.epochs]
    if any(epoch.duplicates or (is_known and epoch.gaps) for epoch in epochs):
        return UNCLEAN
    return CLEAN if is_known else UNKNOWN


def _read(run: str, options: str) -> History:
    try:
        given = json.loads(options)
    except ValueError as error:
        raise ConfigError(f"--storage-options: {error}", field="storage-options", value=options) from error
    if not isinstance(given, dict):
        raise ConfigError("--storage-options: must be a JSON object", field="storage-options", value=options)
    # The run's folder as Ray Train shows it, or raycheck's own below it.
    for url in (_below(run, ROOT), run):
        run_store = RunStore(Store(url, given))
        if run_store.claims():
            return read_history(run_store)
    return History(stretches=(), damaged=())


def _below(url: str, name: str) -> str:
    base, mark, query = url.partition("?") if "://" in url else (url, "", "")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def _unknown(history: History, loaders: Sequence[LoaderAudit]) -> list[str]:
    """Return why it cannot be told, or not wholly; empty if it can."""
    reasons = list(history.damaged)
    if not history.stretches:
        reasons.append("there is no checkpoint of a raycheck run here")
    elif not loaders:
        reasons.append(
            "no checkpoint tells of a raycheck loader: none was passed to attach(), or an older version saved them"
        )
    return reasons + [f"{loader.name}: {reason}" for loader in loaders for reason in loader.unknown]


def _to_json(
    run: str, history: History, loaders: Sequence[LoaderAudit], reasons: Sequence[str], code: int
) -> dict[str, Any]:
    return {
        "run": run,
        "exit_code": code,
        "verdict": _VERDICTS[code],
        "unknown": list(reasons),
        "generations": [
            {
                "generation": stretch.generation,
                "world_size": stretch.world_size,
                "from_step": stretch.from_step,
                "to_step": stretch.to_step,
            }
            for stretch in history.stretches
        ],
        "loaders": [dataclasses.asdict(loader) for loader in loaders],
    }


_VERDICTS = {
    CLEAN: "every item was consumed exactly once",
    UNCLEAN: "there are duplicates or gaps",
    UNKNOWN: "it cannot be told",
}


def _print(
    console: Console,
    history: History,
    loaders: Sequence[LoaderAudit],
    reasons: Sequence[str],
    code: int,
) -> None:
    if history.stretches:
        console.print(_generations_table(history.stretches))
    for loader in loaders:
        console.print(_loader_table(loader))
        for epoch in loader.epochs:
            for what, ranges in (("twice", epoch.duplicates), ("never", epoch.gaps)):
                if ranges:
                    text = f"epoch {epoch.epoch}: {_count(ranges):,} items consumed {what}: positions {_text(ranges)}"
                    console.print(text, style="bold red", soft_wrap=True)
    for reason in reasons:
        console.print(f"unknown: {reason}", style="yellow", soft_wrap=True)
    console.print(_VERDICTS[code], style="bold green" if code == CLEAN else "bold red")


def _generations_table(stretches: Sequence[Stretch]) -> Table:
    table = Table("generation", title="What counts", box=box.SIMPLE)
    table.add_column("workers", justify="right")
    table.add_column("steps", justify="right")
    for stretch in stretches:
        table.add_row(
            stretch.generation, f"{stretch.world_size:,}", f"{stretch.from_step + 1:,} - {stretch.to_step:,}"
        )
    return table


def _loader_table(loader: LoaderAudit) -> Table:
    title = f"{loader.name}: {loader.length:,} items"
    table = Table(title=title, box=box.SIMPLE)
    for name in ("epoch", "consumed", "twice", "never", "repeats", "dropped"):
        table.add_column(name, justify="right")
    table.add_column("positions of each generation")
    for first, last in _groups(loader.epochs):
        pieces = ", ".join(f"{p.generation.partition('-')[0]} {p.begin:,}-{p.end:,}" for p in first.pieces)
        number = f"{first.epoch}" if first is last else f"{first.epoch} - {last.epoch}"
        consumed = sum(piece.end - piece.begin for piece in first.pieces) - first.num_dropped
        table.add_row(
            number,
            f"{consumed:,}" + ("" if first.expected == loader.length else " so far"),
            f"{_count(first.duplicates):,}",
            f"{_count(first.gaps):,}",
            f"{first.num_repeats:,}",
            f"{first.num_dropped:,}",
            pieces,
        )
    return table


def _groups(epochs: Sequence[EpochAudit]) -> list[tuple[EpochAudit, EpochAudit]]:
    """Return first and last of epochs in a row that differ in nothing but their number."""
    groups: list[tuple[EpochAudit, EpochAudit]] = []
    for epoch in epochs:
        if groups and dataclasses.replace(groups[-1][1], epoch=epoch.epoch) == epoch:
            groups[-1] = groups[-1][0], epoch
        else:
            groups.append((epoch, epoch))
    return groups


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in ranges)


def _text(ranges: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{begin:,}-{end:,}" for begin, end in ranges[:10])
    return shown + (f" and {len(ranges) - 10} more" if len(ranges) > 10 else "")
