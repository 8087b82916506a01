"""Samplers of the user's own in a raycheck loader: each epoch's entries once, whatever interrupts it."""

from __future__ import annotations

import collections
import itertools
import json
import random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler

from raycheck import DataLoader
from raycheck.errors import CheckpointMismatchError, ConfigError


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Buckets:
    """Batches of unequal size, as length bucketing makes them: another order in each epoch."""

    def __init__(self, sizes, draw=random.random):
        bounds = np.cumsum([0, *sizes]).tolist()
        self.batches = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
        self.draw = draw

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(sorted(self.batches, key=lambda _: self.draw()))


class ByEpoch:
    """Draws by the epoch that it is told, as samplers for distributed training do."""

    epoch = 0

    def __len__(self):
        return 30

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(30))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


def weighted():
    return WeightedRandomSampler(torch.arange(1.0, 31.0), 30)


def with_generator():
    return RandomSampler(range(30), generator=torch.Generator().manual_seed(7))


def nested_generator():
    return BatchSampler(with_generator(), 4, drop_last=False)


MAKERS = {
    "list": lambda: {"sampler": list(range(29, -1, -1))},
    "weighted": lambda: {"sampler": weighted()},
    "generator": lambda: {"sampler": with_generator()},
    "by epoch": lambda: {"sampler": ByEpoch()},
    "python": lambda: {"batch_sampler": Buckets([1, 5, 2, 7, 3, 4, 8])},
    "numpy": lambda: {"batch_sampler": Buckets([1, 5, 2, 7, 3, 4, 8], np.random.random)},
    "nested": lambda: {"batch_sampler": nested_generator()},
}


def loaders_of(make, world_size=1, **options):
    given_ = make()
    if "sampler" in given_:
        options = {"batch_size": 4, **options}
    return [
        DataLoader(Numbers(30), **make(), rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def taken(loader, num_batches=None):
    """Batches that a loop receives, at most so many."""
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == num_batches:
            break
    return found


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_loader_gives_what_the_straight_one_does(name, num_workers):
    """In the middle of the second epoch, in a process that has drawn nothing."""
    (straight,) = loaders_of(MAKERS[name], num_workers=num_workers)
    epochs = [taken(straight) for _ in range(3)]
    if name != "list":
        assert epochs[0] != epochs[1] != epochs[2]

    (begun,) = loaders_of(MAKERS[name])
    assert taken(begun) == epochs[0]
    assert taken(begun, 2) == epochs[1][:2]
    random.random(), np.random.random(), torch.rand(1)
    (again,) = loaders_of(MAKERS[name], num_workers=num_workers)
    again.load_state_dict(through_json(begun.state_dict()))
    assert taken(again) == epochs[1][2:]
    assert taken(again) == epochs[2]


@pytest.mark.parametrize("name", ["list", "generator", "by epoch", "python"])
def test_ranks_share_an_order_and_another_number_of_them_goes_on_in_it(name):
    """Two ranks, then one, then three: every entry once."""
    (straight,) = loaders_of(MAKERS[name])
    expected = collections.Counter(item for batch in taken(straight) for item in batch)
    used, state = collections.Counter(), None
    for world_size, num_batches in ((2, 1), (1, 2), (3, None)):
        loaders = loaders_of(MAKERS[name], world_size)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            for batch in [taken(loader, num_batches)] if num_batches else [taken(loader)]:
                for items in batch:
                    used.update(items)
            if num_batches is None and loader.num_padded:
                used.subtract(loader.last_indices[-loader.num_padded :])
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        state = through_json(loaders[0].state_dict())
    assert +used == expected


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    stops=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=5),
)
def test_whole_batches_are_dealt_once(sizes, stops):
    """A batch sampler's batches come unbroken, each once, through any chain of stops and resizes."""
    batches, used, state = Buckets(sizes, lambda: 0).batches, [], None
    for world_size, num_batches in [*stops, (1, 10**6)]:
        for rank in range(world_size):
            loader = DataLoader(
                Numbers(sum(sizes)),
                batch_sampler=Buckets(sizes, random.random),
                rank=rank,
                world_size=world_size,
            )
            if state is not None:
                loader.load_state_dict(state)
            for number, batch in enumerate(loader, 1):
                assert batch.tolist() in batches
                if not loader.num_padded:
                    used.append(batch.tolist())
                if number == num_batches or loader.cursor.consumed >= len(sizes):
                    break
            num_taken = loader.state_dict()
        state = num_taken
        if state["consumed"] == len(sizes):
            break
    assert sorted(used) == batches


def test_an_order_that_does_not_come_again_is_refused():
    """A sampler that draws from where nobody looks would give other items at the saved position."""
    hidden = random.Random(1)
    (loader,) = [DataLoader(Numbers(30), batch_sampler=Buckets([3] * 10, hidden.random))]
    taken(loader, 3)
    again = DataLoader(Numbers(30), batch_sampler=Buckets([3] * 10, hidden.random))
    with pytest.raises(CheckpointMismatchError, match="another order for epoch 0") as caught:
        again.load_state_dict(loader.state_dict())
    assert caught.value.field == "batch_sampler"
    assert again.cursor.consumed == 0


def test_a_sampler_that_is_there_on_one_side_only_is_refused():
    """Both ways: the position means other items."""
    with_one = DataLoader(Numbers(30), 4, sampler=list(range(30)))
    without = DataLoader(Numbers(30), 4)
    with pytest.raises(CheckpointMismatchError, match="has none"):
        without.load_state_dict(with_one.state_dict())
    with pytest.raises(CheckpointMismatchError, match="saved without one"):
        with_one.load_state_dict(without.state_dict())


def test_ranks_with_different_orders_are_at_different_places():
    """What each rank tells at a snapshot differs, so that the attempt fails by name."""
    places = [
        DataLoader(Numbers(30), 4, sampler=order, rank=0, world_size=2)._position.place
        for order in (list(range(30)), list(range(29, -1, -1)))
    ]
    assert places[0] != places[1]
    assert places[0].startswith("epoch 0 after 0 items of order ")


def test_drawing_leaves_the_process_generators_alone():
    """An epoch's order is drawn from generators of its own seed."""
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), np.random.random(), torch.rand(1).item()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    (loader,) = loaders_of(MAKERS["python"])
    taken(loader)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


class Longer(Buckets):
    def __len__(self):
        return 99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": DistributedSampler(range(30), 2, 0)}, "the part of one rank"),
        (
            {"batch_sampler": BatchSampler(DistributedSampler(range(30), 2, 0), 4, False)},
            "the part of one rank",
        ),
        ({"sampler": iter(range(30))}, "iterated anew"),
        ({"sampler": [0, 30]}, "from 0 to 29.*it gave 30"),
        ({"sampler": [0, -1]}, "it gave -1"),
        ({"sampler": [0.5]}, "whole numbers"),
        ({"sampler": [[0, 1]]}, "whole numbers"),
        ({"batch_sampler": [0, 1]}, "lists of indices"),
        ({"batch_sampler": [[0], []]}, "batch 1 in epoch 0 is empty"),
        ({"batch_sampler": Longer([3] * 10)}, "gave 10 in epoch 0 and says 99"),
        ({"batch_sampler": [[0]], "global_batch_size": 4}, "batch_sampler is given"),
    ],
)
def test_what_gives_no_shared_order_is_refused(options, message):
    """Before a batch is read; the error names the field."""
    with pytest.raises(ConfigError, match=message) as caught:
        next(iter(DataLoader(Numbers(30), **options)))
    assert caught.value.field in options
