"""``raycheck ls``: the checkpoints of a stored run."""

from __future__ import annotations

import time
from typing import Any

import typer

from raycheck.cli.access import (
    BAD,
    DONE,
    JsonOption,
    OptionsOption,
    RunArgument,
    open_run,
    print_json,
    reported,
)
from raycheck.cli.output import STATE_STYLES, Listing
from raycheck.cli.units import age_text, bytes_text
from raycheck.core.inventory import Stored, newest_usable
from raycheck.core.layout import checkpoint_prefix
from raycheck.observe.inventory import Inventory, read_inventory


def ls(run: RunArgument, as_json: JsonOption = False, options: OptionsOption = "{}") -> None:
    """List the checkpoints of a run, the newest last.

    A usable one counts in the run's lineage and has all its objects with the sizes that were committed; only
    "raycheck verify" reads their bytes. A fenced one was left behind: by a roll-back, or by a writer that a newer
    start cut off. An incomplete one has no manifest.

    Exit codes: 0 there is a usable checkpoint; 1 there is none; 2 the run cannot be read.

    Examples:
        raycheck ls s3://bucket/runs/gpt
        raycheck ls /data/runs/gpt --json
        raycheck ls s3://runs/gpt --storage-options '{"endpoint_url": "http://host:9000"}'
    """
    with reported("ls"):
        inventory = read_inventory(open_run(run, options))
    now_unix_s = time.time()
    newest = newest_usable(inventory.stock)
    code = BAD if newest is None else DONE
    if as_json:
        print_json(_to_json(run, inventory, now_unix_s, code))
    else:
        _print(inventory, now_unix_s)
    raise typer.Exit(code)


def describe(stored: Stored, now_unix_s: float) -> dict[str, Any]:
    """Return a checkpoint as plain JSON values."""
    created_unix_s = stored.created_unix_s
    return {
        "step": stored.ref.step,
        "generation": str(stored.ref.generation),
        "plan_id": stored.ref.plan_id,
        "folder": checkpoint_prefix(stored.ref),
        "state": stored.state,
        "lineage": stored.place,
        "registered": stored.is_registered,
        "created_unix_s": created_unix_s,
        "age_s": None if created_unix_s is None else now_unix_s - created_unix_s,
        "num_bytes": stored.num_bytes,
        "world_size": None if stored.manifest is None else stored.manifest.world_size,
        "note": stored.note,
    }


def _to_json(run: str, inventory: Inventory, now_unix_s: float, code: int) -> dict[str, Any]:
    facts, newest = inventory.facts, newest_usable(inventory.stock)
    return {
        "run": run,
        "exit_code": code,
        "tip": str(facts.tip.generation) if facts.tip else None,
        "newest_claim": str(facts.newest_claim) if facts.newest_claim else None,
        "has_ended": facts.has_ended,
        "newest_usable_step": newest.ref.step if newest else None,
        "checkpoints": [describe(each, now_unix_s) for each in inventory.stock],
    }


def _print(inventory: Inventory, now_unix_s: float) -> None:
    listing = Listing(">step", ">age", ">size", "generation", "lineage", "state")
    for each in inventory.stock:
        created_unix_s = each.created_unix_s
        age_s = None if created_unix_s is None else now_unix_s - created_unix_s
        listing.add(
            str(each.ref.step),
            age_text(age_s),
            bytes_text(each.num_bytes),
            str(each.ref.generation),
            each.place,
            each.state,
            style=STATE_STYLES[each.state],
        )
    if inventory.stock:
        listing.print()
    for each in inventory.stock:
        if each.note:
            typer.echo(f"step {each.ref.step}: {each.note}")
    typer.echo(_summary(inventory))


def _summary(inventory: Inventory) -> str:
    facts, stock = inventory.facts, inventory.stock
    usable = [each for each in stock if each.is_usable]
    total = bytes_text(sum(each.num_bytes for each in stock))
    newest = newest_usable(stock)
    what = f"{len(usable)} usable of {len(stock)}, {total} in all"
    goes_on = "nothing to restore" if newest is None else f"the next start restores step {newest.ref.step}"
    if facts.starting is not None:
        how = f"{facts.starting} is starting, or died before it had restored"
    elif facts.has_ended:
        how = "the job came to its end"
    else:
        how = "the job is running, or was killed"
    return f"{what}; {goes_on}; {how}"
