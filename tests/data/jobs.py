"""Train functions that note every item they consume, for judges outside."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchLoader

import raycheck
from raycheck.runtime import worker
from tests.runtime.jobs import digest, wait_for

LENGTH = 98
"""With 12 items per step a rest of 2 remains: one step of 2 items on one rank as on two, so losses agree."""


class Numbers:
    """Items that say which they are: features that only depend on the index."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def note(config: dict[str, Any], ckpt: Any, epoch: int, items: list[int], loss: float) -> None:
    """Append one line for a step that this rank has completed; whole even if the process is killed next."""
    record = {
        "generation": str(ckpt._session._context.generation) if ckpt._session else None,
        "step": ckpt.current_step,
        "epoch": epoch,
        "rank": config["rank"],
        "items": items,
        "loss": loss,
    }
    path = Path(config["folder"], f"items-{os.getpid()}.jsonl")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, (json.dumps(record) + "\n").encode())
    os.close(fd)


def make_loader(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the loader of the kind that the config names, and what tells the items of its last batch."""
    place = {"rank": config["rank"], "world_size": config["world_size"]}
    dataset = Numbers(config.get("length", LENGTH))
    kind = config.get("kind", "raycheck")
    workers: dict[str, Any] = {"num_workers": config.get("num_workers", 0)}
    if workers["num_workers"]:
        # Processes from a fork server would start another one each, which loads torch again.
        workers["multiprocessing_context"] = "fork"
    if kind == "raycheck":
        loader = raycheck.DataLoader(
            dataset, shuffle=True, global_batch_size=config.get("global_batch_size", 12), **workers, **place
        )
        return loader, loader
    if kind in ("batch_sampler", "prepared"):
        sampler = raycheck.ElasticBatchSampler(dataset, global_batch_size=12, shuffle=True, **place)
        loader = TorchLoader(dataset, batch_sampler=sampler, **workers)
        return prepare(loader, add_dist_sampler=False) if kind == "prepared" else loader, sampler
    sampler = raycheck.ElasticSampler(dataset, global_batch_size=12, shuffle=True, **place)
    return TorchLoader(dataset, 12 // config["world_size"], sampler=sampler, **workers), sampler


def prepare(loader: Any, **options: Any) -> Any:
    """Let Ray wrap a loader."""
    import ray.train.torch

    return ray.train.torch.prepare_data_loader(loader, **options)


def straight(epochs: int = 2) -> dict[str, Any]:
    """Return what an uninterrupted run on one rank gives, without raycheck's checkpoints."""
    worker.set_context(None)
    config = {"rank": 0, "world_size": 1, "epochs": epochs, "folder": None, "optional": True}
    try:
        return train(config)
    finally:
        worker.set_context(None)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train on numbered items for ``epochs`` epochs; note the items of each step.

    Config: ``folder`` of the notes; ``kind`` of loader; ``save_at``: steps
    after which all ranks save; ``pause_at``: wait there to be killed;
    ``dies``: the last rank kills itself there; ``attach_sampler``: pass the sampler in place of the loader; ``peek``:
    rank 0 looks at a batch of its own before the first step; ``stop_at``:
    end after this step.
    """
    torch.set_num_threads(1)
    # The harness's processes are daemons, which may have no children; loader workers end with their parent.
    multiprocessing.current_process()._config["daemon"] = False
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader, told = make_loader(config)
    data = told if config.get("attach_sampler") else loader
    ckpt = raycheck.attach(
        model=model, optimizer=optimizer, loader=data, optional=config.get("optional", False)
    )
    first, losses, saved = ckpt.current_step, [], []
    if config.get("peek") and config["rank"] == 0:
        next(iter(loader))
    for epoch in ckpt.epochs(config.get("epochs", 2)):
        for indices, features in loader:
            # A rank's share of the global batch's mean: the same sum at any number of ranks.
            loss = model(features).square().sum() / 12
            optimizer.zero_grad()
            loss.backward()
            total = loss.detach().clone()
            if config["world_size"] > 1:
                for tensor in [total, *(parameter.grad for parameter in model.parameters())]:
                    dist.all_reduce(tensor)
            optimizer.step()
            ckpt.step({"loss": total})
            losses.append(total.item())
            real = len(indices) - told.num_padded
            if config["folder"] is not None:
                note(config, ckpt, epoch, indices.tolist()[:real], total.item())
            if ckpt.current_step in config.get("save_at", ()):
                saved.append(ckpt.save(block=True))
            if ckpt.current_step == config.get("pause_at"):
                Path(config["folder"], f"reached-{os.getpid()}").touch()
                if config.get("dies") and config["rank"] == config["world_size"] - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                wait_for(str(Path(config["folder"], "never")))
            if ckpt.current_step == config.get("stop_at"):
                return {"first": first, "losses": losses, "saved": saved}
    return {"first": first, "losses": losses, "digest": digest(model), "saved": saved}
