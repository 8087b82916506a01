"""Train functions that run under Ray Train."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck
from tests.runtime import jobs


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Run `tests.runtime.jobs.train`; in the first attempt, die where the test wants it."""
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    Path(config["folder"], f"pid-{rank}").write_text(str(os.getpid()))
    flag = Path(config["folder"], "has-died")
    if config.get("die_after") is not None and not flag.exists():
        config = {**config, "steps": config["die_after"]}
        jobs.train({**config, "rank": rank, "world_size": context.get_world_size()})
        if rank == 1:
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        jobs.wait_for(str(Path(config["folder"], "never")))
    return jobs.train({**config, "rank": rank, "world_size": context.get_world_size()})


def train_and_report(config: dict[str, Any]) -> dict[str, Any]:
    """Train with reports of the user's own in between; see what Ray Train says of checkpoints.

    Config: ``steps``; ``save_at``: steps with save(block=True), after which it
    waits until Ray Train has been given the checkpoint before; ``die_at``:
    step after which rank 1 ends by SIGKILL, the first time.
    """
    context = ray.train.get_context()
    rank, folder = context.get_world_rank(), Path(config["folder"])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ckpt = raycheck.attach(model=model, optimizer=optimizer)
    first, found = ckpt.current_step, ray.train.get_checkpoint()
    for step in range(first + 1, config["steps"] + 1):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        ckpt.step({"loss": 1 / step, "step": step})
        if step % 3 == 0:
            ray.train.report({"mine": step})
        if step in config["save_at"]:
            before = [s for s in config["save_at"] if s < step]
            # Ranks come as they like: one may be alone for longer than save() waits.
            jobs.wait_until(lambda: ckpt.save(block=True))
            if before:
                jobs.wait_until(lambda before=before: before[-1] in registered_steps(folder))
        if step == config.get("die_at") and not (folder / "has-died").exists():
            if rank == 1:
                (folder / "has-died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            jobs.wait_for(str(folder / "never"))
    reported = ray.train.get_all_reported_checkpoints()
    return {
        "first": first,
        "found": found.path if found else None,
        "reported": [item.checkpoint.path for item in reported],
    }


def train_elastic(config: dict[str, Any]) -> int:
    """Train until ``stop`` exists; note each start, and each update before it is told to raycheck."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    folder = Path(config["folder"])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ckpt = raycheck.attach(model=model, optimizer=optimizer)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    with (folder / f"log-{time.time_ns()}-{rank}-of-{world_size}").open("a", buffering=1) as log:
        log.write(f"{ckpt.current_step}\n")
        while not jobs.all_agree((folder / "stop").exists(), world_size):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            log.write(f"{ckpt.current_step + 1}\n")
            ckpt.step()
            time.sleep(0.02)
    return ckpt.current_step


def registered_steps(folder) -> list[int]:
    """Return the steps of the checkpoints in Ray Train's own list, as it lies in the store."""
    snapshot = Path(folder, "run", "checkpoint_manager_snapshot.json")
    try:
        results = json.loads(snapshot.read_text())["checkpoint_results"]
    except (FileNotFoundError, ValueError):
        return []
    return [int(re.search(r"/step-(\d+)-", result["checkpoint_dir_name"])[1]) for result in results]


def trainer(
    folder,
    *,
    callbacks=None,
    train_loop=train,
    num_workers=2,
    storage=None,
    max_failures=2,
    num_to_keep=None,
    scaling=None,
    name="run",
    **config,
):
    """Return a trainer of a run in ``folder``."""
    return TorchTrainer(
        train_loop,
        train_loop_config={"folder": str(folder), "steps": 60, "step_s": 0, **config},
        scaling_config=ScalingConfig(num_workers=num_workers, **(scaling or {})),
        run_config=RunConfig(
            name=name,
            storage_path=storage or str(folder),
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=num_to_keep),
            callbacks=[raycheck.AutoCheckpoint(interval_steps=10**6)] if callbacks is None else callbacks,
        ),
    )


def attach_nothing(config: dict[str, Any]) -> None:
    """Attach in a run that may have no AutoCheckpoint."""
    raycheck.attach(model=torch.nn.Linear(2, 2), optional=config.get("optional", False)).step()
