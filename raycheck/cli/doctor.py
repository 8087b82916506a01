"""``raycheck doctor``: does a machine, or a Ray cluster's nodes, have what raycheck needs?"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from raycheck.cli.access import (
    BAD,
    DONE,
    FAILED,
    JsonOption,
    OptionsOption,
    parse_options,
    print_json,
    reported,
)
from raycheck.cli.facts import gather
from raycheck.cli.health import Finding, Status, judge
from raycheck.cli.planning import parse_bytes

_COLOURS: dict[Status, str] = {"ok": "green", "warning": "yellow", "problem": "red"}
_TOPIC_WIDTH = 13
_MAX_WIDTH = 110

NO_STORAGE = Finding("storage", "ok", "not tried: give --storage with the storage path of your runs")


def doctor(
    storage: Annotated[
        str | None,
        typer.Option("--storage", metavar="URL", help="The storage path of your runs, to be tried."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help='A Ray cluster, such as "auto": each of its nodes is checked.'),
    ] = None,
    state: Annotated[
        str, typer.Option("--bytes", help="State that the workers of one node write per checkpoint.")
    ] = "10GB",
    probe_size: Annotated[
        str, typer.Option("--probe-size", help="Size of the object that is written and read to measure.")
    ] = "64MB",
    as_json: JsonOption = False,
    options: OptionsOption = "{}",
) -> None:
    """Check whether this machine, or a Ray cluster's nodes, have what raycheck needs.

    Tries the store as a run does: writes, lists, reads and deletes a small object, and one to measure how fast it
    is. Of a cluster all nodes try it at once. Settings of "ray job stop" are those of the place where this runs; with
    --address those of the nodes.

    Exit codes: 0 nothing stands in the way, there may be warnings; 1 there is a problem; 2 it could not be checked.

    Examples:
        raycheck doctor
        raycheck doctor --storage s3://bucket/runs --bytes 40GB
        raycheck doctor --address auto --storage s3://bucket/runs --json
    """
    with reported("doctor"):
        given = parse_options(options)
        state_bytes, probe_bytes = parse_bytes(state), max(int(parse_bytes(probe_size)), 1)
        if address is None:
            facts = gather(storage, given, probe_bytes=probe_bytes)
            machines = {facts.host: judge(facts, state_bytes=state_bytes)}
        else:
            machines = _check_nodes(address, storage, given, probe_bytes, state_bytes)
    code = BAD if any(f.status == "problem" for findings in machines.values() for f in findings) else DONE
    if as_json:
        print_json(_to_json(machines, code))
    else:
        for name, findings in machines.items():
            _print(name, findings if storage else [NO_STORAGE, *findings])
    raise typer.Exit(code)


def _check_nodes(
    address: str, storage: str | None, options: Mapping[str, Any], probe_bytes: int, state_bytes: float
) -> dict[str, list[Finding]]:
    # Ray takes seconds to import, and a machine alone is checked without a cluster.
    from raycheck.cli.nodes import ClusterError, gather_on_nodes

    try:
        gathered = gather_on_nodes(address, storage, options, probe_bytes=probe_bytes)
    except ClusterError as error:
        typer.echo(f"raycheck doctor: {error}", err=True)
        raise typer.Exit(FAILED) from error
    return {
        node: [Finding("node", "problem", facts, "raycheck must be installed on every node")]
        if isinstance(facts, str)
        else judge(facts, state_bytes=state_bytes)
        for node, facts in gathered.items()
    }


def _to_json(machines: Mapping[str, Sequence[Finding]], code: int) -> dict[str, Any]:
    return {
        "exit_code": code,
        "machines": [
            {"name": name, "findings": [dataclasses.asdict(finding) for finding in findings]}
            for name, findings in machines.items()
        ],
    }


def _print(name: str, findings: Sequence[Finding]) -> None:
    typer.echo(name)
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    for finding in findings:
        status = f"{finding.status:<7}"
        margin = f"  {status}  {finding.topic:<{_TOPIC_WIDTH}}  "
        text = finding.text + (
            f". {finding.advice[:1].upper()}{finding.advice[1:]}" if finding.advice else ""
        )
        lines = textwrap.wrap(
            text, width, initial_indent=margin, subsequent_indent=" " * len(margin), break_on_hyphens=False
        )
        if sys.stdout.isatty():
            coloured = typer.style(status, fg=_COLOURS[finding.status])
            lines[0] = lines[0].replace(status, coloured, 1)
        typer.echo("\n".join(lines))
