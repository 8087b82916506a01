"""Restoring part of a checkpoint, and under other names."""

import pytest
import torch

from raycheck.core.renames import Renames
from raycheck.errors import CheckpointMismatchError, ConfigError, StateError
from tests.state.rank import Rank


class Net(torch.nn.Module):
    def __init__(self, encoder="encoder", head=4):
        super().__init__()
        self.add_module(encoder, torch.nn.Linear(3, 5))
        self.head = torch.nn.Linear(5, head)

    def forward(self, x):
        first, second = self._modules.values()
        return second(first(x))


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3)).square().sum().backward()
        optimizer.step()
    return optimizer


@pytest.fixture
def saved():
    model = Net()
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    shard = Rank(model=model, optimizer=optimizer, scheduler=scheduler, extra={"note": torch.ones(2)}).save()
    return model, optimizer, shard


def test_only_the_model(saved):
    """strict=False leaves out what is not asked for, and says what."""
    model, _, shard = saved
    fresh = Net()
    rank = Rank(model=fresh, strict=False)
    rank.restore([shard])
    assert torch.equal(fresh.encoder.weight, model.encoder.weight)
    told = "\n".join(rank.unmatched)
    for part in ("optimizer", "scheduler", "extra"):
        assert told.count(f"unexpected: {part} is in the checkpoint and not in attach()") == 1


def test_without_strict_false_the_same_is_refused(saved):
    """And the message names the way out."""
    with pytest.raises(CheckpointMismatchError, match=r"strict=False") as error:
        Rank(model=Net()).restore([saved[2]])
    assert "unexpected: optimizer" in str(error.value)


def test_what_is_only_here_stays_as_it_is(saved):
    """A new layer keeps its initial values; a new scheduler its state."""
    model, _, shard = saved
    fresh = Net()
    fresh.added = torch.nn.Linear(2, 2)
    before = fresh.added.weight.detach().clone()
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    other = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    rank = Rank(model=fresh, optimizer=optimizer, warmup=other, strict=False)
    rank.restore([shard])
    assert torch.equal(fresh.added.weight, before)
    assert torch.equal(fresh.head.bias, model.head.bias)
    assert fresh.added.weight not in optimizer.state
    assert "exp_avg" in optimizer.state[fresh.head.bias]
    told = "\n".join(rank.unmatched)
    assert "missing: model.added.weight is in the model" in told
    assert "missing: warmup is in attach()" in told


def test_a_part_without_tensors_that_is_missing_is_refused(saved):
    """A scheduler that the checkpoint does not have must not start anew unnoticed."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    with pytest.raises(CheckpointMismatchError, match=r"missing: warmup is in attach\(\) and not in the"):
        Rank(
            model=model, optimizer=optimizer, scheduler=scheduler, extra={"note": torch.ones(2)}, warmup=3
        ).restore([saved[2]])


def test_shapes_must_agree_all_the_same(saved):
    """strict=False is about names; another shape is another tensor."""
    fresh = Net(head=7)
    before = fresh.encoder.weight.detach().clone()
    with pytest.raises(CheckpointMismatchError, match=r"shape: model\.head\.weight .*\[4, 5\].*\[7, 5\]"):
        Rank(model=fresh, strict=False).restore([saved[2]])
    assert torch.equal(fresh.encoder.weight, before), "nothing was loaded"


def test_another_number_of_groups_is_refused_before_anything_changes(saved):
    """Their options are restored one by one; strict=False keeps those that are here."""
    _, _, shard = saved
    fresh = Net()
    before = fresh.encoder.weight.detach().clone()
    groups = [{"params": fresh.encoder.parameters(), "lr": 0.7}, {"params": fresh.head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state = {"model": fresh, "optimizer": optimizer, "scheduler": scheduler, "extra": {"note": 0}}
    with pytest.raises(CheckpointMismatchError, match="groups: optimizer has 1 in the checkpoint and 2 here"):
        Rank(**state).restore([shard])
    assert torch.equal(fresh.encoder.weight, before)
    del state["scheduler"]
    Rank(**state, strict=False).restore([shard])
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.3]
    assert "exp_avg" in optimizer.state[fresh.head.weight]


def test_renamed_layers_bring_their_optimizer_state(saved):
    """rename follows a name into the optimizer; other parts of the state as well."""
    model, optimizer, shard = saved
    fresh = Net(encoder="backbone")
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=5.0)
    scheduler = torch.optim.lr_scheduler.StepLR(fresh_optimizer, 5)
    extra = {}
    Rank(
        net=fresh,
        adam=fresh_optimizer,
        scheduler=scheduler,
        notes=extra,
        rename={
            "model": "net",
            "model.encoder": "net.backbone",
            "optimizer": "adam",
            "extra": "notes",
        },
    ).restore([shard])
    assert torch.equal(fresh.backbone.weight, model.encoder.weight)
    assert torch.equal(extra["note"], torch.ones(2))
    assert fresh_optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(
        fresh_optimizer.state[fresh.backbone.weight]["exp_avg"],
        optimizer.state[model.encoder.weight]["exp_avg"],
    )


def test_a_checkpoint_with_the_new_names_is_taken_as_it_is(saved):
    """After the first checkpoint under the new names the same command still works."""
    fresh = Net(encoder="backbone")
    shard = Rank(model=fresh).save()
    again = Net(encoder="backbone")
    Rank(model=again, rename={"model.encoder": "model.backbone"}).restore([shard])
    assert torch.equal(again.backbone.weight, fresh.backbone.weight)


def test_two_names_that_become_one_are_refused(saved):
    """Which of them would be meant?"""
    with pytest.raises(CheckpointMismatchError, match=r"would both be model.encoder"):
        Rank(model=Net(), strict=False, rename={"model.head": "model.encoder"}).restore([saved[2]])


@pytest.mark.parametrize("rename", [{"": "model"}, {"model": ""}, {"model": 3}, {".": "x"}])
def test_a_wrong_mapping_is_refused(rename):
    """It names the pair and what to write."""
    with pytest.raises(ConfigError, match="two dotted names"):
        Rank(model=Net(), rename=rename)


def test_names_end_at_dots():
    """The longest one that fits counts; a part of a word is none."""
    renames = Renames({"a": "x", "a.b": "y", "opt": "o"}, ["o"])
    assert renames("a.c") == "x.c"
    assert renames("a.b.c") == "y.c"
    assert renames("ab.c") == "ab.c"
    assert renames("opt.a.b.exp_avg") == "o.y.exp_avg"
    assert renames("other.a.b") == "other.a.b"


def test_a_model_that_was_built_without_memory(saved):
    """Built on the meta device, given memory, restored: nothing of its own is needed."""
    model, _, shard = saved
    with torch.device("meta"):
        fresh = Net()
    with pytest.raises(StateError, match=r"meta tensor.*to_empty"):
        Rank(model=fresh, strict=False).snapshotter.check()
    fresh.to_empty(device="cpu")
    Rank(model=fresh, strict=False).restore([shard])
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
