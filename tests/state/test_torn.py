"""Every dense change between the boundary and the end of the copy is detected, or does no harm.

One claim throughout: a snapshot either holds the state of its boundary bit for
bit, or is discarded.
"""

import copy
import threading

import pytest
import torch

from raycheck.state import placement
from raycheck.state.snapshot import Discarded, Snapshot
from tests.state.conftest import REAL_AT_ONCE_BYTES
from tests.state.rank import Gate, Rank, make_model, train


def make_rank(make_optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters(), **options)
    train(model, optimizer)
    rank = Rank(model=model, optimizer=optimizer)
    rank.save()
    return rank, model, optimizer


def add_under_no_grad(model, optimizer):
    with torch.no_grad():
        model[0].weight.add_(1)


def add_to_data(model, optimizer):
    model[0].weight.data.add_(1)


def write_through_numpy(model, optimizer):
    model[0].weight.detach().numpy()[...] += 1


def write_through_a_view(model, optimizer):
    model[0].weight.data.view(-1)[:].mul_(2)


def average_weights(model, optimizer):
    with torch.no_grad():
        torch._foreach_lerp_(list(model.parameters()), [torch.ones_like(p) for p in model.parameters()], 0.1)


def change_moments(model, optimizer):
    optimizer.state[model[0].weight]["exp_avg"].data.neg_()


def change_a_step_counter(model, optimizer):
    optimizer.state[model[0].bias]["step"].numpy()[...] += 1


def change_a_small_tensor(model, optimizer):
    model[2].bias.data.copy_(torch.arange(4.0))


def load_model(model, optimizer):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


CHANGES = [
    add_under_no_grad,
    add_to_data,
    write_through_numpy,
    write_through_a_view,
    average_weights,
    change_moments,
    change_a_step_counter,
    change_a_small_tensor,
    load_model,
]


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_outside_of_the_optimizer_never_reaches_a_checkpoint(change, when):
    """Whichever way the bytes change, and on either side of the copy."""
    rank, model, optimizer = make_rank()
    boundary, gate = rank.live(), Gate(rank)
    rank.begin()
    if when == "after the copy":
        gate.open()
        rank.snapshotter._pending.copied.wait()
        change(model, optimizer)
    else:
        change(model, optimizer)
        gate.open()
    outcome = rank.snapshotter.settle(block=True)
    assert isinstance(outcome, Discarded) or rank.holds(boundary)
    if when == "before the copy":
        assert isinstance(outcome, Discarded)
    boundary = rank.live()
    rank.save()
    assert rank.holds(boundary), "the next one holds what was changed"
    rank.close()


@pytest.mark.parametrize("write", [lambda p: p.data.add_(1), lambda p: p.detach().numpy().__iadd__(1)])
def test_what_is_small_is_copied_at_once_and_needs_no_guard(write, monkeypatch):
    """Up to 4 KiB, whatever changes it later; a little more, and it waits and is guarded."""
    monkeypatch.setattr(placement, "AT_ONCE_BYTES", REAL_AT_ONCE_BYTES)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 33, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step(lambda: model(torch.ones(1, 32)).square().mean().backward())
    assert model[0].weight.nbytes == REAL_AT_ONCE_BYTES < model[1].weight.nbytes
    rank = Rank(model=model, optimizer=optimizer)
    rank.save()
    boundary, gate = rank.live(), Gate(rank)
    rank.begin()
    write(model[0].weight)
    optimizer.state[model[0].weight]["exp_avg"].neg_()
    optimizer.state[model[1].weight]["step"].add_(1)
    gate.open()
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
    assert rank.holds(boundary)
    gate = Gate(rank)
    rank.begin()
    write(model[1].weight)
    gate.open()
    outcome = rank.snapshotter.settle(block=True)
    assert isinstance(outcome, Discarded)
    assert "model.1.weight changed" in outcome.reason
    rank.close()


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
def test_memory_that_is_given_up_is_not_read(when):
    """A storage is resized to nothing, as offloading does: the snapshot is dropped, and training goes on."""
    model = torch.nn.Linear(2000, 2000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step(lambda: model(torch.ones(1, 2000)).square().mean().backward())
    rank = Rank(model=model, optimizer=optimizer)
    rank.save()
    gate, storage = Gate(rank), model.weight.untyped_storage()
    num_bytes = storage.nbytes()
    rank.begin()
    if when == "after the copy":
        gate.open()
        rank.snapshotter._pending.copied.wait()
        storage.resize_(0)
    else:
        storage.resize_(0)
        gate.open()
    outcome = rank.snapshotter.settle(block=True)
    assert isinstance(outcome, Discarded)
    assert "model.weight" in outcome.reason
    storage.resize_(num_bytes)
    # What is in fresh memory may be no number, which is not equal to itself.
    model.weight.data.fill_(1.0)
    boundary = rank.live()
    rank.save()
    assert rank.holds(boundary)
    rank.close()


def test_memory_of_another_ranks_share_is_not_read_either():
    """What this rank does not store, it compares with the other's all the same."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, bias=False) for _ in range(2)))
    rank = Rank(0, 2, model=model, optimizer=torch.optim.SGD(model.parameters()))
    stored = {entry.name.partition("@")[0] for entry in rank.save()[1]}
    assert "model.1.weight" not in stored
    gate, storage = Gate(rank), model[1].weight.untyped_storage()
    rank.begin()
    storage.resize_(0)
    gate.open()
    outcome = rank.snapshotter.settle(block=True)
    assert isinstance(outcome, Discarded)
    assert "model.1.weight was given up" in outcome.reason
    rank.close()


def forward_and_backward(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.ones(5, 8)).square().mean()
    loss.backward()
    return loss


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.LBFGS])
@pytest.mark.parametrize("is_keyword", [True, False])
def test_forward_and_backward_in_a_closure_run_while_the_copy_does(make_optimizer, is_keyword):
    """As in Lightning's automatic optimization: the update waits for the copy, what comes before it does not."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    optimizer.step(lambda: forward_and_backward(model, optimizer))
    rank = Rank(model=model, optimizer=optimizer)
    rank.save()
    boundary, gate, num_calls = rank.live(), Gate(rank), 0

    def closure():
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            # Waited for before the closure, the copy would never come.
            gate.open()
        return forward_and_backward(model, optimizer)

    rank.begin()
    optimizer.step(closure=closure) if is_keyword else optimizer.step(closure)
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
    assert num_calls
    assert rank.holds(boundary)
    rank.close()


class Ascending(torch.optim.SGD):
    """Changes parameters before it calls its closure, as sharpness-aware optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1)
        return super().step(closure)


def test_an_optimizer_of_unknown_kind_waits_before_its_closure():
    """What it changes first is guarded as well."""
    rank, model, optimizer = make_rank(Ascending, lr=0.1)
    boundary = rank.live()
    rank.begin()
    optimizer.step(lambda: forward_and_backward(model, optimizer))
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
    assert rank.holds(boundary)
    rank.close()


def replace_data(model, optimizer):
    model[0].weight.data = torch.zeros(16, 8)


def convert_to_double(model, optimizer):
    model.to(torch.float64)


def replace_a_parameter(model, optimizer):
    model[0].weight = torch.nn.Parameter(torch.zeros(16, 8))


def load_optimizer(model, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"].zero_()
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("change", [replace_data, convert_to_double, replace_a_parameter, load_optimizer])
def test_memory_that_is_replaced_is_copied_as_it_was(change):
    """The snapshot keeps the old memory alive; the next one sees the new tensors."""
    rank, model, optimizer = make_rank()
    boundary, gate = rank.live(), Gate(rank)
    rank.begin()
    change(model, optimizer)
    gate.open()
    outcome = rank.snapshotter.settle(block=True)
    # Another dtype is as good as another layout: that snapshot is given up.
    assert isinstance(outcome, Discarded if change is convert_to_double else Snapshot)
    assert isinstance(outcome, Discarded) or rank.holds(boundary)
    boundary = rank.live()
    rank.save()
    assert rank.holds(boundary)
    rank.close()


def transpose_in_place(model, optimizer):
    model[0].weight.data = model[0].weight.data.t()


def reshape_in_place(model, optimizer):
    model[0].weight.data = model[0].weight.data.view(8, 16)


@pytest.mark.parametrize("change", [transpose_in_place, reshape_in_place])
def test_a_shape_that_changes_at_the_same_address_is_noticed(change):
    """What is only recognised by its address is examined while the copy runs."""
    rank, model, optimizer = make_rank()
    change(model, optimizer)
    boundary = rank.live()
    rank.begin()
    outcome = rank.snapshotter.settle(block=True)
    assert isinstance(outcome, Discarded)
    assert "shape" in outcome.reason
    rank.save()
    assert rank.holds(boundary)
    rank.close()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}


def open_soon(gate):
    """Let a copy go from another thread, while this one is in or before the hook."""
    timer = threading.Timer(0.05, gate.open)
    timer.start()
    return timer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_waits_for_the_copy(name):
    """A copy that is late by a whole forward and backward is still of the boundary."""
    rank, model, optimizer = make_rank(OPTIMIZERS[name])
    for seed in range(3):
        boundary, gate = rank.live(), Gate(rank)
        rank.begin()
        timer = open_soon(gate)
        train(model, optimizer, steps=1, seed=seed)
        timer.join()
        assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
        assert rank.holds(boundary)
        assert rank.snapshotter.take_waited_s() > 0
    assert rank.snapshotter._overlap
    rank.close()


def test_lbfgs_with_its_closure():
    """Its history is lists of tensors; it steps the parameters several times in one step."""
    model = make_model()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)
    inputs = torch.randn(5, 8)

    def closure():
        lbfgs.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    rank = Rank(model=model, optimizer=lbfgs)
    boundary, gate = rank.live(), Gate(rank)
    rank.begin()
    # The forwards inside the step also move the running statistics, which were copied at once.
    timer = open_soon(gate)
    lbfgs.step(closure)
    timer.join()
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
    assert rank.holds(boundary)
    fresh = make_model()
    fresh_optimizer = torch.optim.LBFGS(fresh.parameters(), max_iter=4)
    restored = Rank(model=fresh, optimizer=fresh_optimizer)
    restored.restore([rank.shard()])
    state = next(iter(fresh_optimizer.state.values()))
    assert state["n_iter"] == 4
    assert len(state["old_dirs"]) == len([n for n in boundary if "old_dirs" in n])
    rank.close()
    restored.close()


def test_a_skipped_step_of_the_loss_scaler():
    """An optimizer that is not stepped leaves the verdict to the next boundary."""
    rank, model, optimizer = make_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    boundary, gate = rank.live(), Gate(rank)
    rank.begin()
    optimizer.zero_grad()
    (scaler.scale(model(torch.randn(5, 8)).sum()) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9, "the step was skipped"
    assert rank.snapshotter.is_pending
    gate.open()
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
    assert rank.holds(boundary)
    rank.close()


def test_gradient_clipping_and_accumulation_change_nothing_that_is_saved():
    """Gradients are no state: several backwards and a clipping leave the snapshot alone."""
    rank, model, optimizer = make_rank()
    boundary, gate = rank.live(), Gate(rank)
    rank.begin()
    for _ in range(3):
        model(torch.randn(5, 8)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    timer = open_soon(gate)
    optimizer.step()
    timer.join()
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
    assert rank.holds(boundary)
    rank.close()


def test_an_optimizer_in_the_backward_pass():
    """One optimizer per parameter, stepped by its gradient hook: the first that steps waits."""
    model = make_model()
    optimizers = {id(p): torch.optim.AdamW([p]) for p in model.parameters()}

    def update(parameter):
        optimizers[id(parameter)].step()
        optimizers[id(parameter)].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    model(torch.randn(5, 8)).square().mean().backward()
    rank = Rank(model=model, **{f"optimizer{i}": o for i, o in enumerate(optimizers.values())})
    for _ in range(3):
        boundary, gate = rank.live(), Gate(rank)
        rank.begin()
        timer = open_soon(gate)
        model(torch.randn(5, 8)).square().mean().backward()
        timer.join()
        assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
        assert rank.holds(boundary)
    rank.close()


def test_several_optimizers():
    """Whichever steps first waits for all."""
    model = make_model()
    head, body = list(model[2].parameters()), [*model[0].parameters(), *model[1].parameters()]
    first, second = torch.optim.AdamW(head), torch.optim.SGD(body, lr=0.1, momentum=0.9)
    rank = Rank(model=model, first=first, second=second)
    for order in ([first, second], [second, first], [second]):
        model(torch.randn(5, 8)).square().mean().backward()
        boundary, gate = rank.live(), Gate(rank)
        rank.begin()
        timer = open_soon(gate)
        for optimizer in order:
            optimizer.step()
        timer.join()
        assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
        assert rank.holds(boundary)
    rank.close()


def test_an_optimizer_that_was_not_attached_is_detected():
    """Without a hook the canaries and versions are all there is, and they do."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer)
    guarded = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = Rank(model=model, guarded=guarded)
    gate = Gate(rank)
    rank.begin()
    train(model, optimizer, steps=1)
    gate.open()
    assert isinstance(rank.snapshotter.settle(block=True), Discarded)
    assert not rank.snapshotter._overlap, "the hook of what updates this model is not ours"
    boundary = rank.live()
    rank.begin()
    train(model, optimizer, steps=1)
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
    assert rank.holds(boundary)
    rank.close()


def test_a_compiled_step_runs_the_hook_each_time():
    """The hook is not traced away."""
    rank, model, optimizer = make_rank()
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        model(torch.randn(5, 8)).square().mean().backward()
        boundary, gate = rank.live(), Gate(rank)
        rank.begin()
        timer = open_soon(gate)
        step()
        timer.join()
        assert not rank.snapshotter.is_pending, "the hook has given the verdict"
        assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
        assert rank.holds(boundary)
    rank.close()


def test_a_change_in_the_forward_pass():
    """Spectral norm, running statistics and a weight that a forward rewrites: none is torn."""

    class Rewriting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8))
            self.norm = torch.nn.BatchNorm1d(8)
            self.scale = torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            self.scale.data.mul_(0.9)
            return self.norm(self.linear(x)) * self.scale

    model = Rewriting()
    optimizer = torch.optim.AdamW(model.parameters())
    rank = Rank(model=model, optimizer=optimizer)
    outcomes = []
    for _ in range(3):
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        boundary = rank.live()
        gate = Gate(rank)
        rank.begin()
        timer = open_soon(gate)
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        timer.join()
        outcomes.append(rank.snapshotter.settle(block=True))
        assert isinstance(outcomes[-1], Discarded) or rank.holds(boundary)
    assert [type(outcome) for outcome in outcomes] == [Discarded, Snapshot, Snapshot]
    assert rank.snapshotter._eager_names == {"model.scale"}
    assert rank.snapshotter._overlap
    rank.close()
