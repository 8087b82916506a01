"""An independent judge: what was noted outside, along the records in the store."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def surviving(run_folder: str | Path) -> list[tuple[str, int, int | None]]:
    """Return (generation, first step, last step) of each generation that counts, read from the plain files."""
    records: dict[str, Any] = {}
    for path in Path(run_folder, "generations").glob("*.json"):
        if path.name.count(".") == 1:
            fields = json.loads(path.read_text())
            records[tuple(fields["generation"])] = fields
    found: list[tuple[str, int, int | None]] = []
    generation, last = max(records), None
    while True:
        parent = records[generation]["parent"]
        first = parent[0] + 1 if parent else 1
        found.append((f"g{generation[0]:06d}-{generation[1]}", first, last))
        if parent is None:
            return found[::-1]
        generation, last = (parent[1], parent[2]), parent[0]


def notes(folder: str | Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(Path(folder).glob("items-*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def counted(folder: str | Path, run_folder: str | Path) -> dict[int, Counter[int]]:
    """Return how often each item was consumed in each epoch, lost steps left out."""
    used: dict[int, Counter[int]] = {}
    mine = notes(folder)
    for generation, first, last in surviving(run_folder):
        for record in mine:
            is_counted = first <= record["step"] and (last is None or record["step"] <= last)
            if record["generation"] == generation and is_counted:
                used.setdefault(record["epoch"], Counter()).update(record["items"])
    return used


def losses(folder: str | Path, run_folder: str | Path) -> dict[int, float]:
    """Return the loss of each step that counts."""
    found = {}
    mine = notes(folder)
    for generation, first, last in surviving(run_folder):
        for record in mine:
            if record["generation"] == generation and first <= record["step"] <= (last or 10**9):
                found[record["step"]] = record["loss"]
    return found
