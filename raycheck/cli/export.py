"""``raycheck export``: a stored checkpoint in a format that others read."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from raycheck.cli.access import (
    DONE,
    FAILED,
    JsonOption,
    OptionsOption,
    ParallelOption,
    RunArgument,
    StepOption,
    open_run,
    print_json,
    reported,
)
from raycheck.cli.export_files import Assemble, write_hf, write_safetensors
from raycheck.cli.output import ByteProgress
from raycheck.cli.planning import parse_bytes
from raycheck.cli.published import published
from raycheck.cli.units import bytes_text
from raycheck.core.assembly import Placed, whole_chunks
from raycheck.core.inventory import select
from raycheck.core.layout import Entry, Manifest
from raycheck.core.selection import Selection, choose_components
from raycheck.errors import ConfigError
from raycheck.observe.inventory import read_inventory
from raycheck.store.assemble import assemble, read_values
from raycheck.store.run import RunStore

Format = Literal["safetensors", "hf", "pt", "dcp"]

_SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "hf": "-hf", "pt": ".pt", "dcp": "-dcp"}


def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", help="The file or folder to write; it must not exist.")],
    format_name: Annotated[
        Format, typer.Option("--format", help="safetensors and pt: a file. hf and dcp: a folder.")
    ] = "safetensors",
    step: StepOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="COMPONENT", help="A keyword of attach(); may be given several times."
        ),
    ] = None,
    rank: Annotated[
        int, typer.Option("--rank", min=0, help="Whose own tensors and values, such as buffers, are taken.")
    ] = 0,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of one file of an hf set.")] = "5GB",
    parallel: ParallelOption = 8,
    as_json: JsonOption = False,
    options: OptionsOption = "{}",
) -> None:
    """Write a checkpoint's tensors, whole, in a format that others read.

    Every byte is compared with its checksum on the way, and nothing is there under the name of --to until all of it
    is. With one --only the names are those of that object itself, as its load_state_dict() takes them; else they
    begin with the component. An optimizer's state goes by parameter names, as in
    torch.distributed.checkpoint.state_dict. Random states are left out.

    --to may be a folder that exists: the file or folder is then made in it, named by the step.

    Exit codes: 0 written; 1 the checkpoint is damaged, nothing is written; 2 wrong options, or the store failed.

    Examples:
        raycheck export /data/runs/gpt --only model --to gpt.safetensors
        raycheck export s3://bucket/runs/gpt --only model --format hf --to gpt-hf
        raycheck export /data/runs/gpt --format dcp --to gpt-dcp
        raycheck export /data/runs/gpt --format pt --to gpt.pt
    """
    with reported("export"):
        run_store = open_run(run, options)
        stored = select(read_inventory(run_store).stock, step)
        manifest = stored.manifest or run_store.read_manifest(stored.ref)
        entries = run_store.read_layout(manifest)
        selection = _select(run_store, manifest, entries, only or [], rank, must_be_one=format_name == "hf")
        path = _destination(to, format_name, stored.ref.step)
        left_out = _write(
            run_store,
            manifest,
            entries,
            selection,
            path,
            format_name,
            parallel=parallel,
            max_file_bytes=parse_bytes(max_shard_size),
            is_quiet=as_json,
        )
    if as_json:
        print_json(_to_json(run, path, format_name, stored.ref.step, selection, left_out))
    else:
        size = bytes_text(selection.num_bytes)
        typer.echo(f"step {stored.ref.step}: {len(selection.chunks)} tensors, {size}, in {path}")
        for text in left_out:
            typer.echo(f"left out: {text}")
    raise typer.Exit(DONE)


def _select(
    run_store: RunStore,
    manifest: Manifest,
    entries: Sequence[Entry],
    only: Sequence[str],
    rank: int,
    *,
    must_be_one: bool,
) -> Selection:
    if rank >= manifest.world_size:
        raise ConfigError(
            f"--rank {rank}: {manifest.world_size} ranks wrote this checkpoint, from 0 on",
            field="rank",
            value=rank,
        )
    chunks = [chunk for chunk in whole_chunks(entries, rank=rank) if chunk.name != "values"]
    values = read_values(run_store, manifest, entries, rank=rank)
    return choose_components(chunks, values, only, must_be_one=must_be_one)


def _destination(to: Path, format_name: Format, step: int) -> Path:
    # A path has lost one of a URL's two slashes.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(to)):
        raise ConfigError(f"--to {to}: must be a local path", field="to", value=str(to))
    return to / f"step-{step:010d}{_SUFFIXES[format_name]}" if to.is_dir() else to


def _write(
    run_store: RunStore,
    manifest: Manifest,
    entries: Sequence[Entry],
    selection: Selection,
    path: Path,
    format_name: Format,
    *,
    parallel: int,
    max_file_bytes: float,
    is_quiet: bool,
) -> list[str]:
    """Write the export and return what was left out of it."""
    what = f"exporting step {manifest.ref.step}"
    try:
        with (
            published(path, is_folder=format_name in ("hf", "dcp")) as place,
            ByteProgress(what, selection.num_bytes, is_quiet=is_quiet) as progress,
        ):

            def fill(placed: Sequence[Placed], descriptor: int) -> None:
                assemble(
                    run_store,
                    manifest,
                    entries,
                    placed,
                    descriptor,
                    parallel=parallel,
                    cancelled=threading.Event(),
                    on_progress=progress.add,
                )

            return _write_as(format_name, selection, place, fill, max_file_bytes)
    except OSError as error:
        if hasattr(error, "facts"):
            raise
        typer.echo(f"raycheck export: cannot write {path}: {error}", err=True)
        raise typer.Exit(FAILED) from error


def _write_as(
    format_name: Format, selection: Selection, place: Path, fill: Assemble, max_file_bytes: float
) -> list[str]:
    if format_name == "safetensors":
        write_safetensors(selection, place, fill)
    elif format_name == "hf":
        write_hf(selection, place, fill, max_file_bytes=max_file_bytes)
    else:
        # torch takes seconds to import, and the other formats do without it.
        from raycheck.cli import export_torch

        write = export_torch.write_pt if format_name == "pt" else export_torch.write_dcp
        return write(selection, place, fill)
    return []


def _to_json(
    run: str, path: Path, format_name: Format, step: int, selection: Selection, left_out: Sequence[str]
) -> dict[str, Any]:
    return {
        "run": run,
        "exit_code": DONE,
        "step": step,
        "format": format_name,
        "path": str(path),
        "components": list(selection.names),
        "num_tensors": len(selection.chunks),
        "num_bytes": selection.num_bytes,
        "tied": selection.ties,
        "left_out": list(left_out),
    }
