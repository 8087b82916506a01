"""What each of several real processes does in the tests of sharded state."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.state.rank import Rank

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "tests.state.sharded_jobs"])


def on_ranks(job, num_ranks, folder, *args):
    """Run ``job(rank, num_ranks, *args)`` in processes joined by gloo; return what each returned."""
    receivers, processes = [], []
    meeting = Path(folder) / f"meeting-{len(list(Path(folder).glob('meeting-*')))}"
    meeting.mkdir()
    for rank in range(num_ranks):
        receiver, sender = _context.Pipe(duplex=False)
        target = functools.partial(_run, job, rank, num_ranks, str(meeting / "store"), sender, args)
        process = _context.Process(target=target, daemon=True)
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    end_s = time.monotonic() + 90
    results = [
        receiver.recv() if receiver.poll(max(end_s - time.monotonic(), 0)) else "no answer in 90 s"
        for receiver in receivers
    ]
    for process in processes:
        process.join(20)
        process.kill()
    for result in results:
        assert not isinstance(result, str), result
    return [pickle.loads(result) for result in results]


def _run(job, rank, num_ranks, store, sender, args):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        sender.send(pickle.dumps(job(rank, num_ranks, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  the test shows it
        sender.send(traceback.format_exc())


class Net(torch.nn.Module):
    """Odd sizes: on 4 ranks some shards are uneven and some are empty."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.wide = torch.nn.Linear(6, 10)
        self.narrow = torch.nn.Linear(10, 3)
        self.scale = torch.nn.Parameter(torch.randn(1))
        self.big = torch.nn.Linear(3, 300_000, bias=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += 1
        return self.big(self.narrow(torch.relu(self.wide(x)))) * self.scale


def build(kind, seed):
    """Return a model and its optimizer, sharded as ``kind`` says."""
    model = Net(seed)
    size = dist.get_world_size()
    if kind == "fsdp":
        fully_shard(model.wide)
        fully_shard(model)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model.wide, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind in ("tp", "fsdp_tp"):
        shape = (1, size) if kind == "tp" else (2, size // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        if kind == "fsdp_tp":
            fully_shard(model, mesh=mesh["data"])
    elif kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    else:
        # Plain and distributed parameters cannot be updated in one foreach call.
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=kind in ("fsdp", "hsdp", "ddp"))
    return model, optimizer


def train(model, optimizer, first, end):
    """Train on the same batch on every rank, so that the world size does not matter."""
    for step in range(first, end):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def whole(model, optimizer):
    """Return all tensors of the state whole, by name. Collective."""
    inner = getattr(model, "module", model)
    names = {id(p): name for name, p in inner.named_parameters()}
    found = {name: _full(t) for name, t in [*inner.named_parameters(), *inner.named_buffers()]}
    state = getattr(optimizer, "optim", optimizer).state
    for parameter, fields in state.items():
        for key, value in fields.items():
            found[f"{names[id(parameter)]}.{key}"] = _full(value)
    return found


def _full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def save(rank, num_ranks, kind, num_steps, evaluate=False):
    """Train and save; return the shard, all of the state at that step, and the state two steps later."""
    model, optimizer = build(kind, seed=0)
    train(model, optimizer, 0, num_steps)
    if evaluate:
        with torch.no_grad():
            model(torch.ones(4, 6))
    saved = Rank(rank, num_ranks, model=model, optimizer=optimizer)
    shard = saved.save()
    saved.close()
    at_save = whole(model, optimizer)
    train(model, optimizer, num_steps, num_steps + 2)
    return shard, at_save, whole(model, optimizer)


def restore(rank, num_ranks, kind, num_steps, shards):
    """Restore; return all of the state then, two steps later, and the bytes that were read."""
    model, optimizer = build(kind, seed=1)
    restored = Rank(rank, num_ranks, model=model, optimizer=optimizer)
    num_bytes = restored.restore(shards, has_group=num_ranks > 1)
    restored.close()
    at_restore = whole(model, optimizer)
    train(model, optimizer, num_steps, num_steps + 2)
    return at_restore, whole(model, optimizer), num_bytes


def overlapped_steps(rank, num_ranks, kind):
    """Train with a snapshot at every step; return whether each holds what was live at its boundary."""
    model, optimizer = build(kind, seed=0)
    saved = Rank(rank, num_ranks, model=model, optimizer=optimizer)
    train(model, optimizer, 0, 2)
    held = []
    for step in range(2, 8):
        expected = saved.live()
        saved.begin()
        train(model, optimizer, step, step + 1)
        held.append(type(saved.snapshotter.settle(block=True)).__name__)
        held.append(saved.holds_pieces(expected))
    saved.close()
    return held


def refused(rank, num_ranks):
    """Return what is said of tensors that lie on some of the ranks, and of unreduced ones."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Shard

    mesh = init_device_mesh("cpu", (num_ranks,))
    part = DeviceMesh("cpu", [0, 1])
    texts = []
    for tensor in (
        DTensor.from_local(torch.ones(2), part, [Shard(0)]),
        DTensor.from_local(torch.ones(4), mesh, [Partial()]),
    ):
        try:
            Rank(rank, num_ranks, tensor=tensor).save()
        except Exception as error:  # noqa: BLE001
            texts.append(str(error))
    return texts
