"""Where the stall of a snapshot goes: milliseconds of each part, in a training loop that leaves the caches cold.

    python benchmarks/stall_parts.py [--state gpt|large] [--mib 1024] [--sharded] [--ranks 1] [--snapshots 11]

Ours alone and without an agent: what is blocked by a save, against what other
ways block, is in checkpoint_cost.py. With more ranks this one is rank 0 of
them, and compares what all hold alike. Sharded: an FSDP2 model on one rank.
"""

from __future__ import annotations

import argparse
import collections
import os
import statistics
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_state import MIB, GptLike, make_state
from torch.distributed.fsdp import fully_shard

from raycheck.core.page import Plan
from raycheck.state import guard, snapshot
from raycheck.state.codec import Codec
from raycheck.state.live import Live
from raycheck.state.segment import Segment
from raycheck.state.snapshot import Snapshot, Snapshotter
from raycheck.state.tree import StateTree

WARM_UP = 2


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=1024)
    arguments.add_argument("--state", choices=["gpt", "large"], default="gpt")
    arguments.add_argument("--sharded", action="store_true")
    arguments.add_argument("--ranks", type=int, default=1)
    arguments.add_argument("--snapshots", type=int, default=11)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    model, optimizer = sharded_state(given.mib) if given.sharded else make_state(given.state, given.mib * MIB)
    tree = StateTree({"model": model, "optimizer": optimizer})
    segment, parts = Segment(), Parts()
    snapshotter = Snapshotter(
        tree,
        segment,
        rank=0,
        world_size=given.ranks,
        codec=Codec(),
        overlap=True,
        on_layout=lambda image: None,
    )
    parts.time(tree, "capture", "walk over modules and optimizer")
    parts.time(snapshotter, "_take_values", "plain values and random generators")
    parts.time(Live, "of", "names and local tensors")
    parts.time(snapshotter, "_lay_out", "ids and addresses against those known")
    parts.time(snapshotter, "_copy_what_cannot_wait", "small tensors, and the guard of the others")
    parts.time(snapshot, "sample_of", "  of which the sample that ranks compare")
    parts.time(guard.Guard, "changed", "verdict in the optimizer's hook")
    matrix = torch.randn(512, 512)
    optimizer.step()
    optimizer.step()
    keep_apart()
    for number in range(1, WARM_UP + given.snapshots + 1):
        compute(matrix, 200)
        parts.present.clear()
        begin_s = snapshotter.begin(Plan(number, number))
        compute(matrix, 600)
        optimizer.step()
        parts.present["all"] = begin_s + snapshotter.take_waited_s()
        outcome = snapshotter.settle(block=True)
        assert isinstance(outcome, Snapshot), outcome
        if number > WARM_UP:
            parts.keep()
    print(f"{len(parts.kept['all'])} snapshots of {given.mib} MiB, torch {torch.__version__}\n")
    print("| part of the stall | median ms | least | most |\n|---|---|---|---|")
    for name, seconds in parts.kept.items():
        each = (statistics.median(seconds), min(seconds), max(seconds))
        print(f"| {name} | " + " | ".join(f"{1e3 * value:.2f}" for value in each) + " |")
    snapshotter.close()
    segment.close()
    if dist.is_initialized():
        dist.destroy_process_group()


class Parts:
    """Seconds by part, of the present snapshot and of those before."""

    def __init__(self) -> None:
        self.present: collections.Counter[str] = collections.Counter()
        self.kept: dict[str, list[float]] = {}

    def time(self, owner: Any, attribute: str, name: str) -> None:
        """Have a function's time counted from now on."""
        function = getattr(owner, attribute)

        def timed(*args, **kwargs):
            started_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.present[name] += time.perf_counter() - started_s

        setattr(owner, attribute, timed)

    def keep(self) -> None:
        for name, seconds in self.present.items():
            self.kept.setdefault(name, []).append(seconds)


def sharded_state(mib: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """Return an FSDP2 model and its AdamW, whose tensors are DTensors."""
    rendezvous = tempfile.NamedTemporaryFile(prefix="raycheck-benchmark-")  # noqa: SIM115  to the end of the process
    dist.init_process_group("gloo", init_method=f"file://{rendezvous.name}", rank=0, world_size=1)
    model = GptLike(mib * MIB)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model, optimizer


def keep_apart() -> None:
    """Have this thread on one core and the copy thread on the others, where there are others."""
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})
    for thread in threading.enumerate():
        if thread.name == "raycheck-copy" and others:
            os.sched_setaffinity(thread.native_id or 0, set(others))


def compute(matrix: torch.Tensor, num_products: int) -> None:
    for _ in range(num_products):
        torch.mm(matrix, matrix)


if __name__ == "__main__":
    main()
