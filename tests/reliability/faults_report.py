"""From logs of faults to `docs/reliability.md`."""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Outcome = Mapping[str, Any]

_TEXT = """\
# What happens when things fail

raycheck's promise is that a commit which was acknowledged is never lost, that nothing incomplete or damaged is ever
restored, and that training goes on where only saving has failed. This file says how that is tried, and what came of
it. It is written by the command below from its own log; [protocol.md](protocol.md) says why it should hold.

## Result

{result}

## How it is tried

**Without Ray** ({num_plain} faults). Real coordinator, agent and worker processes
([chaos.py](../tests/reliability/chaos.py)) train a model of which every step follows from the one before: two ranks on
two "nodes", a checkpoint every 6 steps at the earliest, two kept. A fault runs *inside* the message or storage call
that its point names, so it cannot come too early or too late, and it has fired only if it was seen to happen. Storage
is a local folder ({num_local} faults), or a SeaweedFS S3 server of the run's own ({num_s3}), in {num_parts} of these
with shards of 6 MB that go up in parts. Before the server stands a [proxy](../tests/reliability/proxy.py) that cuts,
delays, refuses and loses what it is told to.

**In Ray Train jobs** ({num_ray} faults). A job with two workers on a head node of our own, storage in a local folder
([ray_faults.py](../tests/reliability/ray_faults.py)). SIGKILL comes when the store shows the moment; Ray restarts the
workers inside one `fit()`, and a killed driver is submitted again with the same command.

**The judge** ([judge.py](../tests/reliability/judge.py)) shares no code with the restore. After each fault, at once and
again after the next commit, it follows the generations' records itself, reads every manifest in the store, checks that
all it names is there with its sizes and sums, and compares all parameters and all optimizer state, bit for bit, with
the same training run beside it without raycheck. Then a worker group restores, and says what it has.

- *Lost*: the newest step that counts, or the one that a start restores, is older than the newest acknowledged one.
- *Wrong*: a manifest exists for something incomplete or damaged, or some bit of what was stored or restored differs.

## Without Ray

{plain}

{plain_kinds}

## In Ray Train jobs

{ray}

## Run it again

    python benchmarks/faults.py --faults 1900 --ray-faults 100 --document docs/reliability.md

It goes on where it was stopped (`--seconds`, or Ctrl-C): each fault is a line of the log, `build/faults.jsonl` if none
is named. `--parallel` runs several trials at a time; several commands may run as well, each with a `--seed` and a
`--log`, and `--also` names the logs of the others for the document. It ends with an error if anything was lost, wrong,
or did not happen. {times}

The ordinary test-suite has a few dozen of these faults (`pytest tests/reliability`), and named tests for what each
fault of a store must come to.

Not tried here: loss of a whole machine with its memory, disks that lie about what they have synced, more than one
writer (`tests/model/` does that, in a model), and GPUs. A store whose listings are stale breaks an assumption of the
protocol; the trial is that it is refused when a job starts.
"""


def read(log: Path) -> list[dict[str, Any]]:
    """Return what is in a log; nothing if there is none.

    Who finds that a fault failed for a reason in the trial itself writes that reason into
    its line, as "void": it is not counted, and the document says so.
    """
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines()]


def is_well(outcome: Outcome) -> bool:
    """Whether a fault fired and did no harm, or proves nothing (see "void")."""
    if outcome.get("void"):
        return True
    harm = outcome["is_lost"] or outcome["is_wrong"] or outcome.get("problem")
    return bool(outcome["has_fired"]) and not harm


def summary(outcomes: list[dict[str, Any]]) -> str:
    """Return one line."""
    outcomes = [each for each in outcomes if not each.get("void")]
    num_ray = sum(each["is_ray"] for each in outcomes)
    return (
        f"{len(outcomes):,} faults, {num_ray} of them in Ray Train jobs: "
        f"{_count(outcomes, 'has_fired'):,} fired, {_count(outcomes, 'is_lost')} checkpoints lost, "
        f"{_count(outcomes, 'is_wrong')} wrong restores"
    )


def document(
    outcomes: list[dict[str, Any]],
    *,
    points: Mapping[str, str],
    ray_points: Mapping[str, str],
    kinds: Iterable[str],
    ray_kinds: Iterable[str],
) -> str:
    """Return the document; points and kinds come in this order."""
    void = [each for each in outcomes if each.get("void")]
    outcomes = [each for each in outcomes if not each.get("void")]
    plain = [each for each in outcomes if not each["is_ray"]]
    ray = [each for each in outcomes if each["is_ray"]]
    on_s3 = [each for each in plain if each["storage"] != "local"]
    return _TEXT.format(
        result=_result(outcomes, void),
        num_plain=f"{len(plain):,}",
        num_local=f"{len(plain) - len(on_s3):,}",
        num_s3=f"{len(on_s3):,}",
        num_parts=f"{sum(each['storage'] == 's3 in parts' for each in plain):,}",
        num_ray=f"{len(ray):,}",
        plain=table(plain, points, list(kinds)),
        plain_kinds=_starts(plain),
        ray=table(ray, ray_points, list(ray_kinds)),
        times=_times(plain, ray),
    )


def table(outcomes: list[dict[str, Any]], points: Mapping[str, str], kinds: list[str]) -> str:
    """Return a Markdown table: how often each kind was tried at each point, and what came of it.

    Where not all fired, a cell says "tried, fired".
    """
    if not outcomes:
        return "None yet."
    names = [point for point in points if any(each["point"] == point for each in outcomes)]
    cells = collections.defaultdict(list)
    for each in outcomes:
        cells[each["kind"], each["point"]].append(each)
    lines = [
        "| kind \\ point | " + " | ".join(names) + " | tried | fired | checkpoints lost | wrong restores |",
        "|---" + "|--:" * (len(names) + 4) + "|",
    ]
    for kind in kinds:
        row = [each for each in outcomes if each["kind"] == kind]
        if row:
            tried = [_cell(cells[kind, point]) for point in names]
            lines.append(f"| {kind} | " + " | ".join([*tried, *_totals(row)]) + " |")
    columns = [[each for each in outcomes if each["point"] == point] for point in names]
    sums = [_cell(column) for column in columns]
    lines.append("| **all** | " + " | ".join([*sums, *(f"**{each}**" for each in _totals(outcomes))]) + " |")
    for label, field in (("checkpoints lost", "is_lost"), ("wrong restores", "is_wrong")):
        sums = [str(_count(column, field)) for column in columns]
        lines.append(f"| *{label}* | " + " | ".join(sums) + " | | | | |")
    legend = "\n".join(f"- *{name}*: {points[name]}" for name in names)
    return "\n".join(lines) + "\n\n" + legend


def _cell(outcomes: list[dict[str, Any]]) -> str:
    if not outcomes:
        return ""
    fired = _count(outcomes, "has_fired")
    return str(len(outcomes)) if fired == len(outcomes) else f"{len(outcomes)}, {fired}"


def _totals(outcomes: list[dict[str, Any]]) -> list[str]:
    counts = (_count(outcomes, field) for field in ("has_fired", "is_lost", "is_wrong"))
    return [str(len(outcomes)), *map(str, counts)]


def _count(outcomes: Iterable[Outcome], field: str) -> int:
    return sum(bool(each[field]) for each in outcomes)


def _result(outcomes: list[dict[str, Any]], void: list[dict[str, Any]]) -> str:
    lines = [f"{summary(outcomes)}."]
    bad = [each for each in outcomes if not is_well(each)]
    for each in bad:
        where = "Ray Train" if each["is_ray"] else each["storage"]
        what = each.get("problem") or "did not fire"
        lines.append(f"- {each['kind']}, {each['point']}, {where}: {what}")
    if void:
        lines += [
            "",
            f"Not counted are {len(void)} faults during which the trial itself failed, mended since:",
        ]
        for reason, number in sorted(collections.Counter(each["void"] for each in void).items()):
            lines.append(f"- {number}: {reason}")
    commits = sorted({each["commit"] for each in outcomes})
    lines.append("")
    lines.append(
        f"Code: {', '.join(commits)} (with a +: and files that were not committed yet). "
        "One machine with 2 CPU cores, shared with other work."
    )
    return "\n".join(lines)


def _starts(plain: list[dict[str, Any]]) -> str:
    restored = sum(bool(each.get("has_restored")) for each in plain)
    refused = sum(each.get("num_refused", 0) for each in plain)
    return (
        f"After {restored:,} of these a new worker group restored. {refused:,} starts ended with an error, "
        "since the store refused what they need, and were made again, as Ray or a user does."
    )


def _times(plain: list[dict[str, Any]], ray: list[dict[str, Any]]) -> str:
    parts = []
    for name, each in (("without Ray", plain), ("in Ray Train jobs", ray)):
        if each:
            parts.append(f"{statistics.median(o['seconds'] for o in each):.1f} s {name}")
    return f"A fault took {' and '.join(parts)} (median)." if parts else ""
