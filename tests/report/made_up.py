"""A made-up run's records and telemetry of any length, written without the code that reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BEGAN_UNIX_S = 1_760_000_000.0
BOUND = 0.035
_ROWS_PER_OBJECT = 5_000


class MadeUp:
    """A run that goes on until it has so many events; fails now and then.

    Args:
        folder: The run's folder, as Ray Train would name it.
        num_events: When to stop.
        num_ranks: Of the job.
        is_full: With all that a report can use: furthest steps, ranks, sources of restores, notices.
        word: A text to put wherever a text goes.
    """

    def __init__(
        self, folder: Path, num_events: int, *, num_ranks: int = 64, is_full: bool = True, word: str = ""
    ) -> None:
        self.root = folder / "raycheck"
        self.random = random.Random(num_events)
        self.num_ranks, self.is_full, self.word = num_ranks, is_full, word
        self.clock_s, self.step, self.number = BEGAN_UNIX_S, 0, 0
        self.rows: list[dict[str, Any]] = []
        self.inside_s = self.cost_s = 0.0
        self.committed = 0
        self.failures = 0
        self.parent: list[Any] | None = None
        self.last: tuple[int, float] | None = None
        (self.root / "generations").mkdir(parents=True)
        while len(self.rows) < num_events:
            self._generation(num_events)
        self._write()

    def _generation(self, num_events: int) -> None:
        self.number += 1
        self.id = f"{self.number:06d}-{self.random.getrandbits(32):08x}"
        self._claim()
        self._event("generation", world_size=self.num_ranks, is_restart=self.number > 1)
        self._event("begun", seconds=0.2)
        self.clock_s += self.random.uniform(8, 40)
        source = {"source": "memory", "seconds": 1.5, "num_bytes": 10**9} if self.is_full else {}
        self.step = self.parent[0] if self.parent else 0
        self._event("restored", step=self.step, parent=self.parent, parent_accounts={}, **source)
        if self.last and self.is_full:
            step, unix_s = self.last
            self._event("resumed", step=self.step + 1, last_step=step, restart_s=self.clock_s - unix_s)
        self._interval("expected time to failure 3.7 days, a checkpoint costs 5.6 s")
        for _ in range(self.random.randint(20, 300)):
            if len(self.rows) >= num_events:
                break
            self._attempt()
        else:
            lost_s = self.random.uniform(1, 100)
            self.last = self.step + int(lost_s), self.clock_s + lost_s
            if self.is_full and self.random.random() < 0.3:
                self._event(
                    "notice", source="drain", seconds_left=120.0, detail=self.word or "node-7 is taken away"
                )
            self.clock_s += lost_s + self.random.uniform(20, 120)
            self.failures += 1

    def _attempt(self) -> None:
        gap_s = self.random.uniform(60, 140)
        self.clock_s += gap_s
        self.step += int(gap_s)
        stall_s, persist_s = self.random.lognormvariate(-1, 0.5), self.random.lognormvariate(3, 0.4)
        self.cost_s += stall_s + 0.02 * persist_s
        self.inside_s += gap_s
        facts = {"step": self.step, "plan_id": len(self.rows), "stall_s": stall_s, "persist_s": persist_s}
        if self.is_full:
            facts["rank_persists_s"] = [[rank, persist_s / (1 + rank / 8)] for rank in range(3)]
            facts["rank_stalls_s"] = [[7, stall_s]]
        if self.random.random() < 0.03:
            self._event("attempt_failed", reason="lost", detail=self.word or "rank 5 ended", **facts)
            return
        self._event("checkpoint", num_bytes=64 * 10**9, accounts={}, **facts, **self._status())
        self.committed += 1
        self.parent = [self.step, f"g{self.id}", facts["plan_id"]]
        if self.random.random() < 0.08:
            self._interval("upload 21.4 s instead of 17.9 s, a checkpoint costs 5.8 s")

    def _interval(self, why: str) -> None:
        self._event("interval", change=f"interval 90 s -> 100 s: {self.word or why}", **self._status())

    def _status(self) -> dict[str, Any]:
        return {
            "cost_s": self.cost_s,
            "inside_steps_s": self.inside_s,
            "num_checkpoints": self.committed,
            "overhead": self.cost_s / max(self.inside_s, 1.0),
            "max_overhead": BOUND,
            "step_s": 1.0,
            "interval_s": 100.0 + 20 * self.random.random(),
            "decided_by": "risk",
            "reason": self.word or "as before",
        }

    def _event(self, kind: str, **facts: Any) -> None:
        self.rows.append(
            {
                "unix_s": self.clock_s,
                "kind": kind,
                "generation": f"g{self.id}",
                "writer": "made",
                "facts": json.dumps(facts),
            }
        )

    def _claim(self) -> None:
        number, name = self.id.split("-")
        facts = {
            "claimed_unix_s": self.clock_s - 0.2,
            "world_size": self.num_ranks,
            "failure_rate": {
                "prior_gpu_days_per_failure": 3748.0, "gpu_days": 1.0, "failures": {"node": self.failures},
            },
        }  # fmt: skip
        parent = None
        if self.parent:
            writer, hex_id = self.parent[1][1:].split("-")
            parent = [self.parent[0], int(writer), hex_id, self.parent[2]]
        record = {
            "format": 1, "generation": [int(number), name], "world_size": self.num_ranks, "parent": parent, "chain": [],
        }  # fmt: skip
        folder = self.root / "generations"
        (folder / f"{self.id}.claim.json").write_text(json.dumps(facts))
        (folder / f"{self.id}.json").write_text(json.dumps(record))

    def _write(self) -> None:
        (self.root / "telemetry").mkdir()
        for number, begin in enumerate(range(0, len(self.rows), _ROWS_PER_OBJECT)):
            table = pa.Table.from_pylist(self.rows[begin : begin + _ROWS_PER_OBJECT])
            path = self.root / "telemetry" / f"events-made-{number:06d}.parquet"
            pq.write_table(table, path, compression="zstd")
