"""The job that is killed under Ray: ``python -m tests.reliability.ray_job ADDRESS FOLDER``.

Files in the folder tell what happened: ``reports/<generation>-<rank>`` what a
rank restored, ``acks`` which commits rank 0 was told of.
"""

from __future__ import annotations

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
from tests.reliability.training import Trainer, report

INTERVAL_STEPS = 10
NUM_RANKS = 2


def train(config: dict[str, Any]) -> None:
    """Train until killed or told to stop."""
    torch.set_num_threads(1)
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    trainer = Trainer()
    ckpt = raycheck.attach(model=trainer.model, optimizer=trainer.optimizer)
    session = ckpt._session
    generation = session._context.generation.number
    if rank == 0:
        write_acks(session, folder / "acks", generation)
    report(
        folder / "reports" / f"{generation}-{rank}",
        restored=ckpt.current_step,
        digest=trainer.digest(),
        pid=os.getpid(),
    )
    while not (folder / "stop").exists():
        dist.all_reduce(torch.zeros(1))  # as gradients do, it keeps ranks in step
        trainer.step(ckpt.current_step)
        time.sleep(0.03)  # what else a step would do
        ckpt.step()


def write_acks(session: Any, path: Path, generation: int) -> None:
    """Have every commit that this rank is told of written down, as generation and step."""
    obey = session._obey

    def listen(message: dict[str, Any]) -> None:
        if message["op"] == "ended" and message["is_committed"]:
            with path.open("a") as file:
                file.write(f"{generation} {message['plan'][1]}\n")
        obey(message)

    session._obey = listen


def main() -> None:
    """Submit the job and wait for its end."""
    address, folder = sys.argv[1:]
    ray.init(address=address, log_to_driver=True)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=NUM_RANKS),
        run_config=RunConfig(
            name="run",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[
                raycheck.AutoCheckpoint(interval_steps=INTERVAL_STEPS, keep_last=3, upload_bytes_per_s=2e5)
            ],
        ),
    ).fit()


if __name__ == "__main__":
    main()
