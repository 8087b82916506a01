"""The job of `recovery.py`: ``python -m benchmarks.recovery_job ADDRESS FOLDER CONFIG``.

Each rank writes one file per start below ``starts/``: a JSON line that says
what it restored, then a line "step seconds-since-1970" after each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck


def train(config: dict[str, Any]) -> None:
    """Train until ``stop`` exists."""
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    folder = Path(config["folder"])
    torch.manual_seed(0)
    width = int((config["num_mb"] * 1e6 / 8) ** 0.5)  # weights and momentum, 4 bytes each
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    ckpt = raycheck.attach(model=model, optimizer=optimizer)
    restored = ckpt.restored
    begun = {
        "rank": rank,
        "world_size": world_size,
        "pid": os.getpid(),
        "restored": restored.step if restored else None,
        "source": restored.source if restored else None,
        "restore_s": restored.seconds if restored else None,
    }
    features = torch.ones(1, width)
    with (folder / "starts" / f"{time.time_ns()}-{rank}").open("a", buffering=1) as log:
        log.write(json.dumps(begun) + "\n")
        while not agree((folder / "stop").exists(), world_size):
            model(features).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(config["step_s"])  # what else a step would do
            # Before ckpt.step(), in which a rank may stand still: the update is made.
            log.write(f"{ckpt.current_step + 1} {time.time()}\n")
            ckpt.step()


def agree(flag: bool, world_size: int) -> bool:
    """Return rank 0's flag on every rank; keeps them in step, as gradients do."""
    value = torch.tensor(float(flag))
    if world_size > 1:
        dist.broadcast(value, 0)
    return bool(value)


def main() -> None:
    """Submit the job and wait for its end."""
    address, folder, config = sys.argv[1:]
    settings = json.loads(config)
    # `ray job submit` says by itself which cluster it is.
    ray.init(address=address or None, log_to_driver=True)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, **settings},
        scaling_config=ScalingConfig(
            num_workers=(1, 2),
            resources_per_worker={"CPU": 1, "place": 1},
            elastic_resize_monitor_interval_s=1.0,
        ),
        run_config=RunConfig(
            name="run",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[
                raycheck.AutoCheckpoint(
                    interval_steps=settings["interval_steps"],
                    storage_path=settings["storage"],
                    storage_options=settings["storage_options"],
                    register=False,
                )
            ],
        ),
    ).fit()


if __name__ == "__main__":
    main()
