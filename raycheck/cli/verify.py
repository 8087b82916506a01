"""``raycheck verify``: are a stored run's checkpoints, bit for bit, what was committed?"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from raycheck.cli.access import (
    BAD,
    DONE,
    JsonOption,
    OptionsOption,
    ParallelOption,
    RunArgument,
    StepOption,
    open_run,
    print_json,
    reported,
)
from raycheck.cli.output import ByteProgress
from raycheck.cli.units import bytes_text
from raycheck.core.inventory import Stored, select
from raycheck.core.layout import Manifest, checkpoint_prefix, manifest_key, sums_name, uncovered
from raycheck.core.sums import ChunkSums
from raycheck.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from raycheck.observe.inventory import read_inventory
from raycheck.store.run import RunStore
from raycheck.store.verification import Damage, find_damage

_SHARDS_AT_A_TIME = 64
"""Whose checksums are held in memory together: 4 bytes and a Python number for each MiB."""

_MAX_SHOWN = 20


@dataclasses.dataclass(slots=True)
class _Verdict:
    """What became of one checkpoint."""

    stored: Stored
    num_bytes: int = 0
    damage: list[Damage] = dataclasses.field(default_factory=list)
    is_gone: bool = False
    """It was deleted while it was read, as a running job deletes old ones."""

    @property
    def word(self) -> str:
        return "deleted meanwhile" if self.is_gone else "damaged" if self.damage else "ok"


def verify(
    run: RunArgument,
    step: StepOption = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Every committed checkpoint, also those that do not count.")
    ] = False,
    parallel: ParallelOption = 8,
    as_json: JsonOption = False,
    options: OptionsOption = "{}",
) -> None:
    """Read every byte of checkpoints and compare it with the checksums of the commit.

    Each object is read once, and a part that differs once more. Takes 8 MiB of memory for each request at a time. A
    checkpoint that a running job deletes meanwhile is left out.

    Exit codes: 0 all is as it was committed; 1 something is damaged or missing, and named; 2 it could not be read.

    Examples:
        raycheck verify s3://bucket/runs/gpt
        raycheck verify /data/runs/gpt --step 1200
        raycheck verify /data/runs/gpt --all --json
    """
    with reported("verify"):
        if is_all and step is not None:
            raise ConfigError("--step and --all: give one of them", field="step", value=step)
        run_store = open_run(run, options)
        verdicts = []
        for stored in _chosen(run_store, step, is_all):
            verdict = _verify_one(run_store, stored, parallel, is_quiet=as_json)
            verdicts.append(verdict)
            if not as_json:
                _print(verdict)
    code = BAD if any(verdict.damage for verdict in verdicts) else DONE
    if as_json:
        print_json(_to_json(run, verdicts, code))
    raise typer.Exit(code)


def _chosen(run_store: RunStore, step: int | None, is_all: bool) -> list[Stored]:
    stock = read_inventory(run_store).stock
    if not is_all:
        return [select(stock, step)]
    committed = [each for each in stock if each.state != "incomplete"]
    if not committed:
        raise CheckpointNotFoundError("there is no committed checkpoint in this run", available=[])
    return committed


def _verify_one(run_store: RunStore, stored: Stored, parallel: int, *, is_quiet: bool) -> _Verdict:
    """Return the verdict on a checkpoint. Blocks until all of it has been read."""
    verdict = _Verdict(stored)
    try:
        manifest = run_store.read_manifest(stored.ref)
    except CorruptCheckpointError as error:
        verdict.damage.append(_damage_of(error))
    else:
        verdict.num_bytes = sum(shard.num_bytes for shard in manifest.shards)
        verdict.damage += _layout_damage(run_store, manifest)
        what = f"verifying step {stored.ref.step}"
        with ByteProgress(what, verdict.num_bytes, is_quiet=is_quiet) as progress:
            for readable, damage in _with_sums(run_store, manifest, parallel):
                verdict.damage += damage
                verdict.damage += find_damage(
                    run_store.store,
                    readable,
                    parallel=parallel,
                    cancelled=threading.Event(),
                    on_progress=progress.add,
                )
    verdict.is_gone = bool(verdict.damage) and not run_store.is_committed(stored.ref)
    if verdict.is_gone:
        verdict.damage = []
    return verdict


def _layout_damage(run_store: RunStore, manifest: Manifest) -> list[Damage]:
    try:
        problem = uncovered(run_store.read_layout(manifest))
    except CorruptCheckpointError as error:
        return [_damage_of(error)]
    return [] if problem is None else [Damage(manifest_key(manifest.ref), None, problem)]


def _with_sums(
    run_store: RunStore, manifest: Manifest, parallel: int
) -> Iterator[tuple[list[tuple[str, ChunkSums]], list[Damage]]]:
    """Yield some shards at a time with their checksums, and those whose checksums are damaged."""
    prefix = checkpoint_prefix(manifest.ref)

    def read(rank: int) -> tuple[str, ChunkSums] | Damage:
        name = manifest.shards[rank].name
        try:
            return f"{prefix}/{name}", run_store.read_sums(manifest, rank)
        except CorruptCheckpointError as error:
            return Damage(f"{prefix}/{sums_name(name)}", None, str(error))

    with ThreadPoolExecutor(parallel, thread_name_prefix="raycheck-read") as pool:
        for first in range(0, manifest.world_size, _SHARDS_AT_A_TIME):
            ranks = range(first, min(first + _SHARDS_AT_A_TIME, manifest.world_size))
            read_now = list(pool.map(read, ranks))
            damage = [each for each in read_now if isinstance(each, Damage)]
            yield [each for each in read_now if not isinstance(each, Damage)], damage


def _damage_of(error: CorruptCheckpointError) -> Damage:
    return Damage(str(error.facts.get("key", "")), None, str(error))


def _print(verdict: _Verdict) -> None:
    stored = verdict.stored
    size = f", {bytes_text(verdict.num_bytes)} read" if verdict.num_bytes else ""
    typer.echo(f"step {stored.ref.step} of {stored.ref.generation}: {verdict.word}{size}")
    for each in verdict.damage[:_MAX_SHOWN]:
        place = each.key if each.chunk is None else f"{each.key}: chunk {each.chunk}"
        typer.echo(f"  {place}: {each.detail}")
    if len(verdict.damage) > _MAX_SHOWN:
        typer.echo(f"  and {len(verdict.damage) - _MAX_SHOWN} more; --json has them all")


def _to_json(run: str, verdicts: Sequence[_Verdict], code: int) -> dict[str, Any]:
    return {
        "run": run,
        "exit_code": code,
        "checkpoints": [
            {
                "step": verdict.stored.ref.step,
                "generation": str(verdict.stored.ref.generation),
                "plan_id": verdict.stored.ref.plan_id,
                "verdict": verdict.word,
                "num_bytes": verdict.num_bytes,
                "damage": [each._asdict() for each in verdict.damage],
            }
            for verdict in verdicts
        ],
    }
