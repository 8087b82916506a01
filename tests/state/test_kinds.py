"""Kinds of state that are easily lost: ties, inference tensors, views, mutable plain values."""

import os
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from raycheck.errors import CheckpointMismatchError, StateError
from raycheck.state.snapshot import Snapshot
from tests.state.rank import Gate, Rank, make_model


class Three(torch.nn.Module):
    """Three layers of one shape, tied as a test says."""

    def __init__(self, *tie):
        super().__init__()
        self.a = torch.nn.Linear(4, 4, bias=False)
        self.b = torch.nn.Linear(4, 4, bias=False)
        self.c = torch.nn.Linear(4, 4, bias=False)
        if tie:
            to, from_ = (getattr(self, name) for name in tie)
            to.weight = from_.weight


@pytest.mark.parametrize(
    ("saved_tie", "live_tie", "said"),
    [
        (("b", "a"), (), "missing: model.b.weight"),
        (
            (),
            ("b", "a"),
            "tied: model.b.weight is a tensor of its own in the checkpoint and tied to model.a.weight",
        ),
        (("c", "a"), ("c", "b"), "tied: model.c.weight is tied to model.a.weight in the checkpoint"),
    ],
)
def test_ties_that_differ_are_refused(saved_tie, live_tie, said):
    """F4: also where the stored names are the same; nothing live has changed."""
    shard = Rank(model=Three(*saved_tie)).save()
    fresh = Three(*live_tie)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    rank = Rank(model=fresh)
    with pytest.raises(CheckpointMismatchError) as error:
        rank.restore([shard])
    assert said in str(error.value)
    assert all(torch.equal(before[name], value) for name, value in fresh.state_dict().items())


def test_a_tie_holds_over_snapshots_and_restores():
    """F4: one tensor, one entry, still one tensor afterwards; the tied optimizer state once too."""
    model = Three("c", "a")
    optimizer = torch.optim.AdamW(model.parameters())
    (model.a.weight.sum() + model.b.weight.sum()).backward()
    optimizer.step()
    rank = Rank(model=model, optimizer=optimizer)
    rank.save()
    shard = rank.save()
    fresh = Three("c", "a")
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    Rank(model=fresh, optimizer=fresh_optimizer).restore([shard])
    assert fresh.c.weight is fresh.a.weight
    assert torch.equal(fresh.a.weight, model.a.weight)
    assert len(fresh_optimizer.state) == 2


def test_a_tie_that_is_made_or_cut_later_is_seen():
    """Names are joined again only when the structure changes, and ties are no structure."""
    model = Three()
    rank = Rank(model=model)
    rank.save()
    model.b.weight = model.a.weight
    rank.save()
    assert sorted(rank.saved()) == ["model.a.weight", "model.c.weight", "values"]
    model.b.weight = torch.nn.Parameter(torch.ones(4, 4))
    rank.save()
    assert torch.equal(rank.saved()["model.b.weight"], torch.ones(4, 4))


def test_a_changed_structure_is_seen():
    """A layer that is added, replaced by name, or loses a buffer's persistence."""
    model = make_model()
    rank = Rank(model=model)
    rank.save()
    model.append(torch.nn.Linear(4, 2))
    rank.save()
    assert rank.holds(rank.live())
    assert "model.3.weight" in rank.saved()
    model[1].register_buffer("num_batches_tracked", torch.tensor(3), persistent=False)
    rank.save()
    assert "model.1.num_batches_tracked" not in rank.saved()
    model._modules["last"] = model._modules.pop("3")
    rank.save()
    assert {"model.last.weight", "model.last.bias"} <= rank.saved().keys()


def test_inference_tensors():
    """They have no version; they are copied at once, and restored in place."""
    with torch.inference_mode():
        frozen = torch.arange(6.0)
        model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    rank = Rank(frozen=frozen, model=model, optimizer=optimizer)
    rank.save()
    boundary, gate = rank.live(), Gate(rank)
    rank.begin()
    with torch.inference_mode():
        frozen.zero_()
    gate.open()
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
    assert rank.holds(boundary)
    Rank(frozen=frozen, model=model, optimizer=optimizer).restore([rank.shard()])
    assert torch.equal(frozen, torch.arange(6.0))


def test_plain_values_are_isolated():
    """G3: lists, dicts and arrays that change while the copy waits are stored as they were."""
    array, numbers, nested = np.ones(5), [1, 2], {"deep": {"list": [1]}}
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    rank = Rank(model=model, optimizer=optimizer, state={"array": array, "numbers": numbers, **nested})
    gate = Gate(rank)
    rank.begin()
    array += 1
    numbers.append(3)
    nested["deep"]["list"].clear()
    gate.open()
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
    target = {}
    Rank(model=model, optimizer=torch.optim.AdamW(model.parameters()), state=target).restore([rank.shard()])
    assert target["numbers"] == [1, 2]
    assert target["deep"] == {"list": [1]}
    assert np.array_equal(target["array"], np.ones(5))


def test_a_conjugated_view_is_stored_as_its_values():
    """Its memory holds other bytes than its values."""
    value = torch.randn(4, dtype=torch.complex64)
    shard = Rank(x=value.conj()).save()
    target = torch.zeros(4, dtype=torch.complex64)
    Rank(x=target).restore([shard])
    assert torch.equal(target, value.conj())


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, (64 << 10) - 1, 64 << 10, (16 << 20) + 5])
def test_sizes_around_every_threshold(num_bytes):
    """Small pieces are gathered, large ones copied in pieces: no byte is lost between."""
    generator = torch.Generator().manual_seed(num_bytes)
    make = lambda: torch.nn.Parameter(  # noqa: E731
        torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, generator=generator), requires_grad=False
    )
    model = torch.nn.ParameterList([make() for _ in range(3)])
    rank = Rank(model=model, optimizer=torch.optim.SGD(model.parameters()))
    boundary = rank.live()
    rank.save()
    assert rank.holds(boundary)


def test_more_small_tensors_than_one_call_takes():
    """A system call gathers 1,024 pieces; there may be more."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((3,), float(i))) for i in range(2500)])
    rank = Rank(model=model, optimizer=torch.optim.SGD(model.parameters()))
    boundary = rank.live()
    rank.save()
    assert rank.holds(boundary)


@pytest.fixture
def one_rank_mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_sharded_tensor_is_refused_by_name(one_rank_mesh):
    """Better than storing one rank's part as the whole."""
    sharded = DTensor.from_local(torch.ones(2), one_rank_mesh, [Replicate()])
    with pytest.raises(StateError, match=r"x\.y is a DTensor"):
        Rank(x={"y": sharded}).snapshotter.check()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_and_a_lazy_tensor_are_refused_by_name():
    """F3: no plain bytes, or none yet."""
    with pytest.raises(StateError, match=r"model\.weight is a UninitializedParameter"):
        Rank(model=torch.nn.LazyLinear(3)).snapshotter.check()
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    with pytest.raises(StateError, match="x is a quantized"):
        Rank(x=quantized).snapshotter.check()


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class, whose constructor has not run."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_a_wrapped_optimizer_is_refused_with_what_to_pass():
    """Its own hooks do not exist: what it wraps has them."""
    wrapper = Wrapper(torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(StateError, match=r"optimizer is a Wrapper.*optimizer=wrapper\.optimizer") as caught:
        Rank(optimizer=wrapper)
    assert caught.value.key == "optimizer"


def test_a_training_thread_that_never_lets_go_of_the_interpreter():
    """G6: the copy ends although another thread computes in Python all the time."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(20_000)) for _ in range(100)])
    rank = Rank(model=model, optimizer=torch.optim.SGD(model.parameters()))
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(1000))

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        assert rank.save()
    finally:
        stop.set()
        spinner.join()


def test_a_child_process_does_not_keep_the_memory():
    """An orphaned data-loader process has neither the arena nor its descriptor's mapping."""
    rank = Rank(x=torch.ones(1000))
    rank.save()
    # The kernel's name for it: address, rights, offset, device, inode, path.
    inode = str(os.fstat(rank.segment.fd).st_ino)
    read_end, write_end = os.pipe()

    def is_mapped():
        with open("/proc/self/maps") as maps:
            return any(
                line.split()[4] == inode and "memfd:raycheck" in line for line in maps.read().splitlines()
            )

    assert is_mapped()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, str(is_mapped()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_end)
    assert os.read(read_end, 10) == b"False"
    os.close(read_end)
    rank.close()
