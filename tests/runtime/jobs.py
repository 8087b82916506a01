"""Train functions for the harness: deterministic, and they stop where a test wants them to."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import raycheck


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all parameters and buffers."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()[:16]


def digest_of(pieces: Iterable[bytes]) -> str:
    """Return a digest of bytes, one after the other."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece)
    return sha.hexdigest()[:16]


def wait_for(path: str) -> None:
    """Block until a file exists."""
    wait_until(lambda: os.path.exists(path), f"nobody made {path}")


def wait_until(condition: Callable[[], bool], otherwise: str = "waited in vain") -> None:
    """Block until a condition holds."""
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s, otherwise
        time.sleep(0.005)


def all_agree(flag: bool, world_size: int) -> bool:
    """Return rank 0's flag on every rank."""
    value = torch.tensor(float(flag))
    if world_size > 1:
        dist.broadcast(value, 0)
    return bool(value)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train a small model; return what it saw.

    Config: ``steps``; ``step_s`` to slow steps down; ``pause_at`` and
    ``pause_file``: say so in ``pause_file + ".reached"`` before that step's
    update and wait for the file; ``width`` of the model; ``diverge``: ranks do
    not share gradients; ``save_at``: steps after which all ranks call
    save(block=True); ``save_rank0_at``: the same on rank 0 alone;
    ``stop_file``: end with the step after this file exists.
    """
    rank, world_size = config["rank"], config["world_size"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, config.get("width", 32)),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(config.get("width", 32), 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
    if config.get("diverge"):
        torch.manual_seed(rank + 1)
    ckpt = raycheck.attach(model=model, optimizer=optimizer, scheduler=scheduler, seen=0)
    first = ckpt.current_step
    losses, blocked = [], None
    for step in range(first, config["steps"]):
        features = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = model(features).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if world_size > 1 and not config.get("diverge"):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if step == config.get("pause_at"):
            Path(config["pause_file"] + f".reached{rank}").touch()
            wait_for(config["pause_file"])
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        ckpt.values["seen"] += 1
        time.sleep(config.get("step_s", 0.005))
        ckpt.step({"loss": loss})
        if step + 1 in config.get("save_at", ()):
            blocked = ckpt.save(block=True)
        if step + 1 == config.get("save_rank0_at") and rank == 0:
            blocked = ckpt.save(block=True)
        if "stop_file" in config and all_agree(os.path.exists(config["stop_file"]), world_size):
            break
    return {
        "first": first,
        "seen": ckpt.values["seen"],
        "losses": losses,
        "digest": digest(model),
        "lr": scheduler.get_last_lr()[0],
        "restored": ckpt.restored.step if ckpt.restored else None,
        "source": ckpt.restored.source if ckpt.restored else None,
        "num_bytes": ckpt.restored.num_bytes if ckpt.restored else None,
        "blocked": blocked,
    }


def train_noted(config: dict[str, Any]) -> None:
    """Train without end and note each completed step in ``folder``, by rank and start; ranks keep in step.

    Config: ``folder``; ``sigterm_grace_s``: as the callback would set it.
    """
    from raycheck.runtime import signals, worker

    rank, folder = config["rank"], Path(config["folder"])
    if "sigterm_grace_s" in config:
        signals.install_sigterm(config["sigterm_grace_s"], tell=worker.tell_notice)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ckpt = raycheck.attach(model=model, optimizer=optimizer)
    (folder / f"restored-{rank}").write_text(str(ckpt.current_step))
    while True:
        model(torch.ones(8)).sum().backward()
        all_agree(True, config["world_size"])
        optimizer.step()
        ckpt.step({"step": ckpt.current_step + 1})
        (folder / f"step-{rank}.tmp").write_text(str(ckpt.current_step))
        (folder / f"step-{rank}.tmp").rename(folder / f"step-{rank}")
        time.sleep(0.005)


def sleep_with_sigterm(config: dict[str, Any]) -> None:
    """Set the handler of SIGTERM without attaching anything, and wait."""
    from raycheck.runtime import signals, worker

    def fail(source: str, seconds_left: float, detail: str) -> bool:
        raise RuntimeError("nobody there")

    signals.install_sigterm(60.0, tell=fail if config["raises"] else worker.tell_notice)
    Path(config["folder"], "ready").touch()
    wait_for(str(Path(config["folder"], "never")))


def end_in_error(config: dict[str, Any]) -> None:
    """Attach and raise."""
    raycheck.attach(model=torch.nn.Linear(2, 2))
    raise ValueError("the user's own")


def attach_unsavable(config: dict[str, Any]) -> None:
    """Attach something that cannot be saved."""
    raycheck.attach(model=torch.nn.Linear(2, 2), mine={"a": [{"b": lambda: 0}]})


def attach_twice(config: dict[str, Any]) -> None:
    """Attach and attach again."""
    raycheck.attach(model=torch.nn.Linear(2, 2))
    raycheck.attach(model=torch.nn.Linear(2, 2))


def train_sharded(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model that FSDP2 has sharded, or a plain one; return a digest of the whole of it.

    Config: ``steps``; ``is_sharded``; ``width``; ``attach``: options for ``attach``.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, config["width"]), torch.nn.Linear(config["width"], 3))
    if config["is_sharded"]:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ckpt = raycheck.attach(model=model, optimizer=optimizer, **config.get("attach", {}))
    first = ckpt.current_step

    def digest_now() -> str:
        tensors = [
            *model.parameters(),
            *(optimizer.state[p]["exp_avg"] for p in model.parameters() if optimizer.state.get(p)),
        ]
        wholes = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return digest_of(whole.detach().numpy().tobytes() for whole in wholes)

    at_restore = digest_now()
    for step in range(first, config["steps"]):
        # The same batch on every rank: the world size does not matter.
        features = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(features).square().mean().backward()
        optimizer.step()
        ckpt.step()
    return {
        "restored": ckpt.restored.step if ckpt.restored else None,
        "num_bytes": ckpt.restored.num_bytes if ckpt.restored else 0,
        "at_restore": at_restore,
        "at_end": digest_now(),
        "state_bytes": 3 * sum(p.numel() * 4 for p in model.parameters()),
    }
