"""Does memory stay flat over many checkpoints, a third of which fail?

    python benchmarks/flat_memory.py [--checkpoints 1000] [--mb 100]

Real processes: a worker that trains and saves with ``save(block=True)``, its
agent, and the coordinator in this process. For every third save the agent's
limit on file sizes is lowered, so that the disk refuses its writes. Memory,
descriptors and threads of each process are read along the way; at the end
they must be what they were after the first tenth, but for a few MB.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import raycheck
from tests.runtime.harness import LocalCluster, wait_until

ALLOWED_GROWTH_BYTES = 16 << 20
ALLOWED_GROWTH_ITEMS = 4


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Save after every step; wait before each until the benchmark lets it go."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.zeros(config["num_items"] // 100)) for _ in range(100)]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = raycheck.attach(model=model, optimizer=optimizer)
    gate = open(config["gate"])  # noqa: SIM115  for as long as this process lives
    outcomes = []
    for _ in range(config["steps"]):
        gate.readline()
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        outcomes.append(ckpt.save(block=True))
        Path(config["done"]).write_text(str(len(outcomes)))
    return {"committed": sum(outcomes), "failed": len(outcomes) - sum(outcomes)}


def use_of(process: psutil.Process) -> tuple[int, int, int]:
    """Return private memory in bytes with the shared part counted once, descriptors and threads."""
    # Not the resident size, nor a share of it: both move with what other processes map of the same files.
    with open(f"/proc/{process.pid}/smaps_rollup") as file:
        own_bytes = sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))
    return own_bytes + segment_bytes(process), process.num_fds(), process.num_threads()


def segment_bytes(process: psutil.Process) -> int:
    """Return the shared memory that a process holds by its descriptors, each segment once."""
    held = {}
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            if os.readlink(path).startswith("/memfd:raycheck"):
                held[os.stat(path).st_ino] = os.stat(path).st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(held.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--mb", type=int, default=100)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="raycheck-memory-") as name:
        folder = Path(name)
        cluster = LocalCluster(str(folder / "run"), interval_steps=1_000_000, keep_last=1, telemetry=False)
        try:
            sys.exit(run(cluster, folder, given.checkpoints, given.mb * 1_000_000))
        finally:
            cluster.close()


def run(cluster: LocalCluster, folder: Path, num_checkpoints: int, num_bytes: int) -> int:
    gate, done = folder / "gate", folder / "done"
    os.mkfifo(gate)
    config = {
        "num_items": num_bytes // 4,
        "steps": num_checkpoints,
        "gate": str(gate),
        "done": str(done),
    }
    generation = cluster.start(train, config)
    opener = open(gate, "w")  # noqa: SIM115  closed with the process: the worker reads to the end
    agent = psutil.Process(cluster.agents["node0"].pid)
    processes = {
        "worker": psutil.Process(generation.workers[0].pid),
        "agent": agent,
        "coordinator (and this script)": psutil.Process(),
    }
    seen: dict[int, dict[str, tuple[int, int, int]]] = {}
    marks = {max(num_checkpoints * part // 10, 1) for part in (1, 5, 10)}
    for number in range(1, num_checkpoints + 1):
        limit = num_bytes // 2 if number % 3 == 0 else resource.RLIM_INFINITY
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        opener.write("go\n")
        opener.flush()
        wait_until(lambda number=number: done.exists() and done.read_text() == str(number), f"save {number}")
        if number in marks:
            cluster.coordinator._deletion.submit(int).result(60)
            seen[number] = {kind: use_of(process) for kind, process in processes.items()}
    outcome = generation.results()[0]
    stored_bytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    return report(seen, outcome, num_checkpoints, stored_bytes / num_bytes)


def report(
    seen: dict[int, dict[str, tuple[int, int, int]]],
    outcome: dict[str, int],
    num_checkpoints: int,
    kept: float,
) -> int:
    first, last = min(seen), max(seen)
    print("| process | " + " | ".join(f"after {n}: MB, descriptors, threads" for n in sorted(seen)) + " |")
    print("|---|" + "---|" * len(seen))
    is_flat = True
    for kind in seen[first]:
        cells = [
            f"{seen[n][kind][0] / 1e6:.0f}, {seen[n][kind][1]}, {seen[n][kind][2]}" for n in sorted(seen)
        ]
        print(f"| {kind} | " + " | ".join(cells) + " |")
        before, after = seen[first][kind], seen[last][kind]
        is_flat &= after[0] - before[0] < ALLOWED_GROWTH_BYTES
        is_flat &= all(after[i] - before[i] <= ALLOWED_GROWTH_ITEMS for i in (1, 2))
    print(
        f"\n{num_checkpoints} saves: {outcome['committed']} committed, {outcome['failed']} failed as meant, "
        f"{kept:.1f} checkpoints left in the store; {'flat' if is_flat else 'NOT FLAT'}"
    )
    as_planned = outcome["failed"] == num_checkpoints // 3 and threading.active_count() < 50
    return 0 if is_flat and as_planned else 1


if __name__ == "__main__":
    main()
