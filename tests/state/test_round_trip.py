"""Snapshot to shards to another process's state, without Ray and without a store."""

import collections
import datetime
import logging
import random

import numpy as np
import pytest
import safetensors.torch
import torch

from raycheck.errors import CheckpointMismatchError, StateError
from raycheck.state.codec import Codec
from raycheck.state.snapshot import Discarded, Snapshot
from raycheck.state.tree import StateTree
from tests.state.rank import Rank, make_model, same, train


def test_model_optimizer_and_scheduler_come_back_bit_for_bit():
    """What training had at the step is what a fresh process gets, and it trains on alike."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer)
    scheduler.step()
    shard = Rank(model=model, optimizer=optimizer, scheduler=scheduler).save()
    train(model, optimizer, seed=2)

    model2 = make_model()
    optimizer2 = torch.optim.AdamW(model2.parameters(), lr=5.0)
    scheduler2 = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer2, 10)
    Rank(model=model2, optimizer=optimizer2, scheduler=scheduler2).restore([shard])
    assert optimizer2.param_groups[0]["lr"] == pytest.approx(scheduler2.get_last_lr()[0])
    assert scheduler2.last_epoch == 1
    train(model2, optimizer2, seed=2)
    assert same(model, model2)


@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 3), (3, 1), (2, 5), (4, 4)])
def test_any_world_size_restores_any_other(num_writers, num_readers):
    """Shared state is dealt at saving and whole at restoring (K1)."""
    model = torch.nn.Linear(600, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 600)).sum().backward()
    optimizer.step()
    writers = [
        Rank(r, num_writers, model=model, optimizer=optimizer, mine=torch.tensor([r]))
        for r in range(num_writers)
    ]
    shards = [writer.save() for writer in writers]
    sizes = [len(data) for data, _ in shards]
    assert max(sizes) < 1.2 * min(sizes), "the deal is even"
    for rank in range(num_readers):
        fresh = torch.nn.Linear(600, 700)
        fresh_optimizer = torch.optim.AdamW(fresh.parameters())
        mine = torch.tensor([-1])
        Rank(rank, num_readers, model=fresh, optimizer=fresh_optimizer, mine=mine).restore(shards)
        assert same(model, fresh)
        assert mine.item() == rank % num_writers
        moments = optimizer.state[model.weight]["exp_avg"]
        assert torch.equal(fresh_optimizer.state[fresh.weight]["exp_avg"], moments)


def test_a_shard_is_a_safetensors_file():
    """The arena is the file: other tools read it."""
    model = make_model()
    data, _ = Rank(model=model).save()
    tensors = safetensors.torch.load(data)
    assert torch.equal(tensors["model.0.weight"], model[0].weight)


def test_lazy_optimizer_state_is_neither_needed_nor_made():
    """E2: unused parameters have no state before and after; saving changes nothing live."""
    model = make_model()
    model.extra = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW(model.parameters())
    empty = Rank(model=model, optimizer=optimizer).save()
    for p in [p for p in model.parameters() if p is not model.extra]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = optimizer.state[model[0].weight]["step"].clone()
    shard = Rank(model=model, optimizer=optimizer).save()
    assert torch.equal(optimizer.state[model[0].weight]["step"], before)
    for saved, expected in ((empty, 0), (shard, 6)):
        fresh = make_model()
        fresh.extra = torch.nn.Parameter(torch.zeros(3))
        fresh_optimizer = torch.optim.AdamW(fresh.parameters())
        Rank(model=fresh, optimizer=fresh_optimizer).restore([saved])
        assert len(fresh_optimizer.state) == expected
        assert fresh.extra not in fresh_optimizer.state


def test_names_carry_no_wrapper():
    """E8: a compiled or wrapped model saves and loads like the plain one."""
    model = make_model()
    wrapped = torch.nn.DataParallel(torch.compile(model))
    _, entries = shard = Rank(model=wrapped).save()
    assert {"model.0.weight", "model.1.running_mean"} <= {entry.name for entry in entries}
    fresh = make_model()
    with torch.no_grad():
        fresh[0].weight.zero_()
    Rank(model=fresh).restore([shard])
    assert same(model, fresh)


def test_a_tied_weight_is_stored_once():
    """F4: bytes count once and the tie holds."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, 64)
            self.head = torch.nn.Linear(64, 50, bias=False)
            self.head.weight = self.embedding.weight

    model, fresh = Tied(), Tied()
    _, entries = shard = Rank(model=model).save()
    assert [e.name for e in entries if "weight" in e.name] == ["model.embedding.weight"]
    Rank(model=fresh).restore([shard])
    assert torch.equal(model.head.weight, fresh.head.weight)
    assert fresh.head.weight is fresh.embedding.weight


def test_every_dense_tensor_comes_back():
    """F1, F2, F3: odd sizes, strides and dtypes; bytes written are those of the elements."""
    big = torch.arange(1_000_000.0)
    state = {
        "scalar": torch.tensor(3.0),
        "one": torch.ones(1),
        "empty": torch.empty(0),
        "empty2": torch.empty(0, 5),
        "flag": torch.tensor(True),
        "slice": big[:10],
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "columns": torch.arange(12).view(3, 4)[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "complex": torch.randn(4, dtype=torch.complex64),
        "real": torch.view_as_real(torch.randn(4, dtype=torch.complex64)),
        "bf16": torch.randn(5).bfloat16(),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    data, _ = shard = Rank(**state).save()
    assert len(data) < 40_000
    fresh = {name: torch.zeros_like(value).contiguous() for name, value in state.items()}
    Rank(**fresh).restore([shard])
    for name, value in state.items():
        assert fresh[name].dtype == value.dtype
        assert fresh[name].shape == value.shape
        assert (
            torch.equal(fresh[name].float(), value.float())
            if name == "fp8"
            else torch.equal(fresh[name], value)
        )


@pytest.mark.parametrize("bad", [torch.empty(2, device="meta"), torch.eye(3).to_sparse()])
def test_what_cannot_be_stored_is_named(bad):
    """F3: refused at the check with its name, never written as zeros."""
    with pytest.raises(StateError, match=r"bad\.inner"):
        Rank(bad={"inner": bad}).snapshotter.check()


def test_plain_values_come_back_with_their_types():
    """E1: types survive, in place, into an empty container."""
    values = {
        "n": None,
        "b": True,
        "i": 2**70,
        "f": float("nan"),
        "inf": -float("inf"),
        "t": (1, (2, "x")),
        "s": {3, 1},
        "d": {1: "a", (2, 3): [4]},
        "tagged": {"!": "tuple"},
        "od": collections.OrderedDict(z=1, a=2),
        "q": collections.deque([1, 2], maxlen=5),
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "span": datetime.timedelta(days=1, microseconds=2),
        "raw": b"\x00\xff",
        "np": np.arange(6, dtype=np.int16).reshape(2, 3),
        "np1": np.float32(1.5),
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "c": 1 + 2j,
        "tensor": [torch.arange(3)],
    }
    shard = Rank(values_=values, count=7).save()
    target = {}
    rank = Rank(values_=target, count=0)
    rank.restore([shard])
    assert rank.tree.values["count"] == 7
    assert repr(target) == repr(values)
    assert {k: type(v) for k, v in target.items()} == {k: type(v) for k, v in values.items()}


def test_tensors_at_one_path_stay_two():
    """A key with a dot, and a dict of dicts."""
    values = {"a.b": torch.ones(2), "a": {"b": torch.zeros(3), "c": [torch.ones(1)], "c[0]": torch.zeros(1)}}
    shard = Rank(notes=values).save()
    target = {}
    Rank(notes=target).restore([shard])
    assert repr(target) == repr(values)


class WithExtraState(torch.nn.Module):
    """Keeps tensors outside of its parameters, as modules for eight-bit training keep their scales."""

    def __init__(self, scale, inner=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), scale))
        self.extra = {"weight": torch.full((2,), scale), "history": [scale]}
        self.model = inner

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_tensors_in_extra_state_come_back():
    """Under a name that no parameter has, also where a submodule is called as the part is."""
    model, fresh = (WithExtraState(a, WithExtraState(b)) for a, b in ((1.0, 2.0), (0.0, 0.0)))
    shard = Rank(model=model).save()
    Rank(model=fresh).restore([shard])
    assert repr([fresh.extra, fresh.model.extra]) == repr([model.extra, model.model.extra])
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))


def test_extra_state_that_is_only_here_or_there_is_told():
    """It would be left as it is, silently."""
    plain = torch.nn.Module()
    plain.weight = torch.nn.Parameter(torch.zeros(3))
    there, here = Rank(model=WithExtraState(1.0)).save(), Rank(model=plain).save()
    with pytest.raises(CheckpointMismatchError, match=r"unexpected: model\._extra_state"):
        Rank(model=plain).restore([there])
    with pytest.raises(CheckpointMismatchError, match=r"missing: model\._extra_state"):
        Rank(model=WithExtraState(1.0)).restore([here])


@pytest.mark.parametrize("bad", [lambda: 0, (i for i in ()), open(__file__)])  # noqa: SIM115
def test_an_unsavable_object_is_named_by_its_path(bad):
    """E3: the check at the start names the object three levels deep."""
    with pytest.raises(StateError, match=r"mine\.a\[0\]\.b") as error:
        Rank(mine={"a": [{"b": bad}]}).snapshotter.check()
    assert error.value.key == "mine.a[0].b"


class Custom:
    """A type that needs pickle."""

    def __init__(self):
        self.text = "kept"


def test_pickle_only_for_types_that_the_user_names():
    """P1: allowed on both sides or refused on either."""
    shard = Rank(mine={"x": Custom()}, codec=Codec((Custom,))).save()
    target = {}
    Rank(mine=target, codec=Codec((Custom,))).restore([shard])
    assert target["x"].text == "kept"
    with pytest.raises(Exception, match="allow_pickle"):
        Rank(mine={}).restore([shard])


def test_every_generator_repeats_its_own_numbers():
    """E4, E5: ranks keep their own random states, new ranks get new ones."""

    def draw():
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    shards, wanted = [], []
    for rank in range(2):
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        shards.append(Rank(rank, 2, x=0).save())
        wanted.append(draw())
    for rank in range(2):
        Rank(rank, 2, x=0).restore(shards)
        assert draw() == wanted[rank]
    drawn = []
    for rank in range(4):
        Rank(rank, 4, x=0).restore(shards)
        drawn.append(tuple(draw()))
    assert len(set(drawn)) == 4


def test_the_loss_scale_is_kept():
    """E6: scale and growth tracker are those saved, with no dummy step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    scaler._growth_tracker.fill_(7)
    shard = Rank(scaler=scaler).save()
    fresh = torch.amp.GradScaler("cpu")
    Rank(scaler=fresh).restore([shard])
    assert fresh.state_dict() == scaler.state_dict()


def test_moments_keep_their_dtype():
    """F5: fp32 moments of bf16 parameters stay fp32."""
    model = make_model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.randn(p.shape)}
    shard = Rank(model=model, optimizer=optimizer).save()
    fresh = make_model().bfloat16()
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    Rank(model=fresh, optimizer=fresh_optimizer).restore([shard])
    moments = fresh_optimizer.state[fresh[0].weight]["exp_avg"]
    assert moments.dtype == torch.float32
    assert torch.equal(moments, optimizer.state[model[0].weight]["exp_avg"])


def test_another_models_checkpoint_is_refused_before_anything_changes():
    """All differences are listed; no live tensor has changed."""
    shard = Rank(model=make_model()).save()
    other = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(16, 4), torch.nn.Linear(1, 1)
    )
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointMismatchError) as error:
        Rank(model=other).restore([shard])
    text = str(error.value)
    assert "shape: model.0.weight is torch.float32 [16, 8]" in text
    assert "missing: model.3.weight" in text
    assert "unexpected: model.1.running_mean" in text
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_a_snapshot_is_of_one_step_while_training_goes_on():
    """G3: updates after the boundary do not reach the snapshot."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    rank = Rank(model=model, optimizer=optimizer)
    train(model, optimizer)
    for _ in range(20):
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        rank.begin()
        train(model, optimizer, steps=1)
        outcome = rank.snapshotter.settle(block=True)
        assert isinstance(outcome, Snapshot)
        fresh = make_model()
        fresh_optimizer = torch.optim.AdamW(fresh.parameters())
        Rank(model=fresh, optimizer=fresh_optimizer).restore([rank.shard()])
        assert all(torch.equal(kept[name], value) for name, value in fresh.state_dict().items())


@pytest.mark.parametrize("bump", [lambda p: p.add_(1), lambda p: p.numpy().__iadd__(1)])
def test_a_change_outside_the_optimizer_is_detected(bump, caplog):
    """A dense in-place update that no hook sees discards the snapshot and is named."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    rank = Rank(model=model, optimizer=optimizer)
    rank.begin()
    rank.snapshotter._pending.copied.wait()
    with torch.no_grad():
        bump(model[0].weight.detach())
    caplog.set_level(logging.WARNING)
    outcome = rank.snapshotter.settle(block=True)
    assert isinstance(outcome, Discarded)
    assert "model.0.weight" in caplog.text
    assert rank.save(), "the next one is copied at once and works"


def test_the_replica_digest_tells_ranks_apart():
    """F6: equal ranks agree, at the first snapshot and at every sample; different ones do not."""

    def digests(model):
        rank = Rank(0, 2, model=model)
        found = []
        for _ in range(17):
            rank.begin()
            found.append(rank.snapshotter.settle(block=True).replica_digest)
        return found

    one, other = make_model(), make_model()
    assert digests(one) == digests(other)
    with torch.no_grad():
        other[2].bias[0] += 1
    assert digests(one)[0] != digests(other)[0]
    assert digests(one)[1:] != digests(other)[1:], "the rotating sample sees all bytes in 16 snapshots"


def test_a_keyword_that_is_taken_is_refused():
    """The names that the checkpoint itself uses are not the user's."""
    with pytest.raises(StateError, match="rng"):
        StateTree({"rng": 1})


def test_a_structured_array_is_refused_by_name():
    """Its fields have names that the stored text would lose."""
    with pytest.raises(StateError, match=r"extra\.table is a numpy\.ndarray"):
        Rank(extra={"table": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])}).save()
