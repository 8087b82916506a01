"""The job whose stored run the tests of the command line look at."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import raycheck


class Net(torch.nn.Module):
    """A parameter of each kind: cut along rows or columns, half and quarter precision, tied, 0-dim, large, empty."""

    def __init__(self, *, is_sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows, columns = torch.randn(7, 6), torch.randn(5, 8, dtype=torch.bfloat16)
        if is_sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            rows = distribute_tensor(rows, mesh, [Shard(0)])
            columns = distribute_tensor(columns, mesh, [Shard(1)])
        self.embed = torch.nn.Linear(6, 7, bias=False)
        self.embed.weight = torch.nn.Parameter(rows)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.columns = torch.nn.Parameter(columns)
        self.quarter = torch.nn.Parameter(torch.randn(3, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.large = torch.nn.Parameter(torch.randn(300_000, 1))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("seen", torch.tensor(dist.get_rank() if is_sharded else 0))
        self.register_buffer("is_odd", torch.tensor([True, False]))
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train to ``steps``; save after those of ``save_at``, and what is then live in ``folder``."""
    model = Net(is_sharded=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    # Plain and distributed parameters cannot be updated in one foreach call.
    optimizer = torch.optim.AdamW(trained, lr=0.1, foreach=False)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
    loader = raycheck.DataLoader(range(40), batch_size=2, shuffle=True)
    spectrum = torch.complex(torch.randn(3), torch.randn(3))
    notes = {"tried": [1, 2.5], "begun": datetime.date(2026, 1, 2)}
    ckpt = raycheck.attach(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, spectrum=spectrum, notes=notes
    )
    for _ in ckpt.epochs(10):
        for _ in loader:
            for parameter in trained:
                parameter.grad = torch.full_like(parameter, 0.01 * (ckpt.current_step + 1))
            model.calls += 1
            model.seen += 2
            optimizer.step()
            scheduler.step()
            ckpt.step({"loss": 1 / (ckpt.current_step + 1)})
            if ckpt.current_step in config["save_at"]:
                save_together(ckpt)
                keep_live(Path(config["folder"]), ckpt.current_step, model, optimizer, spectrum)
            if ckpt.current_step == config["steps"]:
                return {"restored": ckpt.restored.step if ckpt.restored else None}
    return {}


def save_together(ckpt: Any) -> None:
    """Save the present step. Collective; a busy machine may take the ranks more than the second they have."""
    for _ in range(30):
        dist.barrier()
        is_saved = torch.tensor(float(ckpt.save(block=True)))
        dist.all_reduce(is_saved, dist.ReduceOp.MAX)
        if is_saved:
            return
    raise AssertionError(f"step {ckpt.current_step} could not be saved in 30 attempts")


def keep_live(folder: Path, step: int, model: Net, optimizer: Any, spectrum: torch.Tensor) -> None:
    """Write what the model and the optimizer hold, whole, as rank 0 sees it. Collective."""
    names = {id(p): name for name, p in model.named_parameters()}
    live = {
        f"model.{name}": whole(tensor) for name, tensor in model.state_dict().items() if "extra" not in name
    }
    for parameter, fields in optimizer.state.items():
        for key, value in fields.items():
            live[f"optimizer.model.{names[id(parameter)]}.{key}"] = whole(value)
    live["spectrum"] = spectrum.clone()
    if dist.get_rank() == 0:
        torch.save(live, folder / f"live-{step}.pt")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that all ranks hold whole."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
