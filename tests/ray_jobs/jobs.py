"""Train functions that run under Ray Train."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
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


def trainer(
    folder, *, callbacks=None, train_loop=train, num_workers=2, storage=None, max_failures=2, **config
):
    """Return a trainer of a run in ``folder``."""
    return TorchTrainer(
        train_loop,
        train_loop_config={"folder": str(folder), "steps": 60, "step_s": 0, **config},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="run",
            storage_path=storage or str(folder),
            failure_config=FailureConfig(max_failures=max_failures),
            callbacks=[raycheck.AutoCheckpoint(interval_steps=10**6)] if callbacks is None else callbacks,
        ),
    )


def attach_nothing(config: dict[str, Any]) -> None:
    """Attach in a run that may have no AutoCheckpoint."""
    raycheck.attach(model=torch.nn.Linear(2, 2), optional=config.get("optional", False)).step()
