"""``raycheck show``: what one checkpoint of a stored run holds."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from raycheck.cli.access import (
    DONE,
    JsonOption,
    OptionsOption,
    RunArgument,
    StepOption,
    open_run,
    print_json,
    reported,
)
from raycheck.cli.output import Listing
from raycheck.cli.runs import describe
from raycheck.cli.units import age_text, bytes_text
from raycheck.core.interval_text import percent, seconds_text
from raycheck.core.inventory import Stored, select
from raycheck.core.layout import Entry
from raycheck.observe.events import read_events
from raycheck.observe.inventory import read_inventory
from raycheck.store.run import RunStore

_NUM_BIGGEST = 8

POLICY_FIELDS = (
    "interval_s", "decided_by", "reason", "overhead", "max_overhead", "step_s", "stall_s", "persist_s",
    "num_checkpoints", "bytes_per_rank",
)  # fmt: skip
"""What telemetry says of the interval when a checkpoint was committed, where it says it."""


@dataclasses.dataclass(slots=True)
class _Tensor:
    """A tensor of a layout, over all ranks' shards."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int = 0
    num_boxes: int = 0
    num_owners: int = 0
    """Ranks that have one of their own; 0: all share it."""


def show(
    run: RunArgument, step: StepOption = None, as_json: JsonOption = False, options: OptionsOption = "{}"
) -> None:
    """Show what a checkpoint holds: its tensors, who wrote it, and how the interval was chosen then.

    Reads names and sizes, no tensor. Tensors that each rank has its own of, such as buffers, count once here and
    with their bytes of all ranks.

    Exit codes: 0 shown; 1 the checkpoint is damaged; 2 there is none, or the run cannot be read.

    Examples:
        raycheck show /data/runs/gpt
        raycheck show s3://bucket/runs/gpt --step 1200 --json
    """
    with reported("show"):
        run_store = open_run(run, options)
        stored = select(read_inventory(run_store).stock, step)
        manifest = stored.manifest or run_store.read_manifest(stored.ref)
        entries = run_store.read_layout(manifest)
        policy = _policy(run_store, stored)
    report = _report(run, stored, entries, policy)
    if as_json:
        print_json(report)
    else:
        _print(report)
    raise typer.Exit(DONE)


def _policy(run_store: RunStore, stored: Stored) -> dict[str, Any]:
    """Return what the telemetry tells of the checkpoint; nothing if it is off or lost."""
    ref = stored.ref
    for event in read_events(run_store.store):
        facts = event["facts"]
        if (
            event["kind"] == "checkpoint"
            and event["generation"] == str(ref.generation)
            and (facts.get("step"), facts.get("plan_id")) == (ref.step, ref.plan_id)
        ):
            return {name: facts[name] for name in POLICY_FIELDS if facts.get(name) is not None}
    return {}


def _report(run: str, stored: Stored, entries: Iterable[Entry], policy: Mapping[str, Any]) -> dict[str, Any]:
    manifest = stored.manifest
    assert manifest is not None, "its layout has been read"
    tensors = _tensors(entries)
    return {
        "run": run,
        "exit_code": DONE,
        **describe(stored, time.time()),
        "layout": manifest.layout_digest,
        "write_id": manifest.write_id,
        "metrics": manifest.metrics,
        "loaders": {name: _position(account) for name, account in manifest.accounts.items()},
        "shards": [dataclasses.asdict(shard) for shard in manifest.shards],
        "components": _sums(tensors, lambda tensor: tensor.name.partition(".")[0]),
        "dtypes": _sums(tensors, lambda tensor: tensor.dtype),
        "num_tensors": len(tensors),
        "num_elements": sum(math.prod(tensor.shape) for tensor in tensors),
        "tensors": [dataclasses.asdict(tensor) for tensor in tensors],
        "policy": dict(policy),
    }


def _tensors(entries: Iterable[Entry]) -> list[_Tensor]:
    """Return the tensors, the biggest first; the plain values of the ranks are none."""
    found: dict[str, _Tensor] = {}
    owners: dict[str, set[int]] = {}
    for entry in entries:
        if entry.name == "values":
            continue
        tensor = found.setdefault(entry.name, _Tensor(entry.name, entry.dtype, entry.global_shape))
        tensor.num_bytes += entry.num_bytes
        tensor.num_boxes += 1
        if entry.owner >= 0:
            owners.setdefault(entry.name, set()).add(entry.owner)
            tensor.num_owners = len(owners[entry.name])
    return sorted(found.values(), key=lambda tensor: (-tensor.num_bytes, tensor.name))


def _sums(tensors: Iterable[_Tensor], key_of: Any) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        row = sums.setdefault(key_of(tensor), {"num_tensors": 0, "num_bytes": 0})
        row["num_tensors"] += 1
        row["num_bytes"] += tensor.num_bytes
    return sums


def _position(account: Any) -> Any:
    """Return where a loader was, as the last run of its account says; None for what is none."""
    try:
        _, _, epoch, consumed = account["runs"][-1]
        return {"epoch": epoch, "consumed": consumed, "length": account["length"]}
    except (TypeError, KeyError, IndexError, ValueError):
        return None


def _print(report: Mapping[str, Any]) -> None:
    age = age_text(report["age_s"])
    typer.echo(f"step {report['step']}, {report['state']}, {report['lineage']}, committed {age} ago")
    if report["note"]:
        typer.echo(f"  {report['note']}")
    typer.echo(f"folder      {report['folder']}")
    sizes = sorted(shard["num_bytes"] for shard in report["shards"])
    span = " to ".join(dict.fromkeys([bytes_text(sizes[0]), bytes_text(sizes[-1])]))
    typer.echo(f"world size  {report['world_size']}, a shard of {span} each")
    typer.echo(f"layout      {report['layout']}")
    typer.echo(f"tensors     {report['num_tensors']:,}, {report['num_elements']:,} elements")
    for name, value in report["metrics"].items():
        typer.echo(f"metric      {name} {value:.6g}")
    for name, position in report["loaders"].items():
        where = "unknown" if position is None else _position_text(position)
        typer.echo(f"loader      {name}: {where}")
    for line in _policy_lines(report["policy"]):
        typer.echo(line)
    for title in ("components", "dtypes"):
        typer.echo("")
        listing = Listing(title.removesuffix("s"), ">tensors", ">size")
        for name, row in report[title].items():
            listing.add(name, f"{row['num_tensors']:,}", bytes_text(row["num_bytes"]))
        listing.print()
    _print_biggest(report["tensors"])


def _position_text(position: Mapping[str, Any]) -> str:
    return f"epoch {position['epoch']}, {position['consumed']:,} of {position['length']:,} items consumed"


def _policy_lines(policy: Mapping[str, Any]) -> list[str]:
    if not policy:
        return ["interval    nothing is known of it: there is no telemetry of this checkpoint"]
    lines = [f"interval    {policy.get('reason', 'not chosen yet')}"]
    costs = [
        f"{name} {seconds_text(policy[field])}"
        for name, field in (("stall", "stall_s"), ("upload", "persist_s"), ("step time", "step_s"))
        if field in policy
    ]
    if costs:
        lines.append(f"costs       {', '.join(costs)}")
    if "overhead" in policy and "max_overhead" in policy:
        lines.append(
            f"overhead    {percent(policy['overhead'])} so far, {percent(policy['max_overhead'])} allowed"
        )
    return lines


def _print_biggest(tensors: list[Mapping[str, Any]]) -> None:
    if not tensors:
        return
    typer.echo("")
    listing = Listing("biggest tensors", "dtype", ">shape", ">size", "where")
    for tensor in tensors[:_NUM_BIGGEST]:
        owners, boxes = tensor["num_owners"], tensor["num_boxes"]
        listing.add(
            tensor["name"],
            tensor["dtype"],
            "x".join(map(str, tensor["shape"])) or "-",
            bytes_text(tensor["num_bytes"]),
            f"{owners} ranks' own" if owners > 1 else "a rank's own" if owners else _boxes_text(boxes),
        )
    listing.print()
    if len(tensors) > _NUM_BIGGEST:
        typer.echo(f"and {len(tensors) - _NUM_BIGGEST} more; --json has them all")


def _boxes_text(boxes: int) -> str:
    return "whole" if boxes == 1 else f"{boxes} parts"
