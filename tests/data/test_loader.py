"""Loader and samplers: each item once per epoch, whatever interrupts it."""

import json
import multiprocessing
import random
import time
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import IterableDataset, Subset, TensorDataset

from raycheck.core.cursor import Cursor, Rest, order_of
from raycheck.data.loader import DataLoader
from raycheck.data.sampler import ElasticBatchSampler, ElasticSampler, items_at
from raycheck.errors import CheckpointMismatchError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Numbers:
    """The numbers 0 to length - 1, counted as they are read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_read = multiprocessing.Value("q", 0)
        self.offset = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        with self.num_read.get_lock():
            self.num_read.value += 1
        return index + self.offset


class Draws(Numbers):
    """Each item with a draw from every global generator, as augmentation makes them."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Columns(Numbers):
    """Reads whole batches, and gives columns instead of a list of items."""

    def __getitems__(self, indices: list[int]) -> dict[str, list[int]]:
        assert type(indices) is list or not torch.utils.data.get_worker_info()
        return {"x": list(indices)}


class Broken(Numbers):
    """Cannot read one item."""

    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise ValueError("item 9 is unreadable")
        return index


def unchanged(batch):
    return batch


def set_offset(worker_id: int) -> None:
    torch.utils.data.get_worker_info().dataset.offset = 100


def through_json(state):
    return json.loads(json.dumps(state))


def take(loader, num_batches: int) -> list[list[int]]:
    iterator = iter(loader)
    return [next(iterator).tolist() for _ in range(num_batches)]


def drain(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches) -> list[int]:
    return [item for batch in batches for item in batch]


def resumed(state, dataset, *arguments, **options) -> DataLoader:
    loader = DataLoader(dataset, *arguments, **options)
    loader.load_state_dict(through_json(state))
    return loader


class Job:
    """All ranks of a job in one process, advancing step by step together."""

    def __init__(self, length: int, world_size: int, batch_size: int = 1, state=None, **options) -> None:
        self.used: list[int] = []
        """Items that count, in the order of steps and ranks."""
        self.repeats: list[int] = []
        self.loaders = [
            DataLoader(Numbers(length), batch_size, rank=rank, world_size=world_size, **options)
            for rank in range(world_size)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(through_json(state))

    def run(self, num_steps: int | None = None) -> int:
        """Take steps, all that remain of the pass by default; return how many."""
        iterators = [iter(loader) for loader in self.loaders]
        num_done = 0
        while num_steps is None or num_done < num_steps:
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                assert batches == [None] * len(batches), "ranks differ in their number of steps"
                break
            num_done += 1
            for loader, batch in zip(self.loaders, batches, strict=True):
                assert batch.tolist() == loader.last_indices
                assert 1 <= len(batch) <= loader.batch_size
                end = len(batch) - loader.num_padded
                self.used += loader.last_indices[:end]
                self.repeats += loader.last_indices[end:]
        return num_done

    @property
    def state(self):
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_d1_a_resume_inside_a_later_epoch_uses_that_epochs_order(num_workers):
    """Stopped in epoch 2 after 7 batches: the rest of it and epoch 3 are those of a straight run."""
    dataset = Numbers(100)
    options = {"batch_size": 4, "shuffle": True, "num_workers": num_workers}
    straight_loader = DataLoader(dataset, **options)
    straight = [drain(straight_loader) for _ in range(4)]
    first = DataLoader(dataset, **options)
    assert [drain(first), drain(first), take(first, 7)] == [*straight[:2], straight[2][:7]]
    second = resumed(first.state_dict(), dataset, **options)
    assert second.epoch == 2
    assert drain(second) == straight[2][7:]
    assert drain(second) == straight[3]
    assert [sorted(flat(epoch)) for epoch in straight] == [list(range(100))] * 4
    assert len({tuple(flat(epoch)) for epoch in straight}) == 4


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("calls_set_epoch", [False, True])
def test_d2_epochs_after_a_resume_are_whole(persistent, calls_set_epoch):
    """Resumed 3 batches before the end of epoch 1: epochs 2 and 3 give all ids once."""
    dataset = Numbers(128)
    options = {"batch_size": 8, "shuffle": True, "num_workers": 2, "persistent_workers": persistent}
    first = DataLoader(dataset, **options)
    first.set_epoch(1)
    begun = take(first, 13)
    loader = resumed(first.state_dict(), dataset, **options)
    epochs = []
    for epoch in range(loader.epoch, 4):
        if calls_set_epoch:
            loader.set_epoch(epoch)
        assert len(loader) == (3 if epoch == 1 else 16)
        epochs.append(flat(drain(loader)))
        assert loader.epoch == epoch
    assert sorted(flat(begun) + epochs[0]) == list(range(128))
    assert [sorted(epoch) for epoch in epochs[1:]] == [list(range(128))] * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_d3_prefetched_batches_are_not_consumed(persistent):
    """Workers are far ahead when batch 5 is saved: the first batch after the resume is number 6."""
    dataset = Numbers(400)
    options = {
        "batch_size": 4,
        "shuffle": True,
        "num_workers": 4,
        "prefetch_factor": 8,
        "persistent_workers": persistent,
    }
    straight = drain(DataLoader(dataset, 4, shuffle=True))
    loader = DataLoader(Numbers(400), **options)
    iterator = iter(loader)
    used = [next(iterator).tolist() for _ in range(5)]
    deadline_s = time.monotonic() + 30
    while loader.dataset.num_read.value < 4 * 20:
        assert time.monotonic() < deadline_s, "workers do not prefetch"
        time.sleep(0.005)
    state = loader.state_dict()
    assert used == straight[:5]
    assert state["consumed"] == 20
    assert drain(resumed(state, dataset, **options)) == straight[5:]


@pytest.mark.parametrize("remainder", ["exact", "pad", "drop"])
def test_d4_a_length_that_no_world_size_divides(remainder):
    """503 ids on 4 ranks, then on 3: each id counts once; dropped ids are those of the straight run."""
    options = {"shuffle": True, "remainder": remainder, "global_batch_size": 32}
    straight = Job(503, 4, **options)
    straight.run()
    first = Job(503, 4, **options)
    first.run(6)
    second = Job(503, 3, state=first.state, **options)
    second.run()
    used = first.used + second.used
    assert Counter(used) == Counter(straight.used)
    assert max(Counter(used).values()) == 1
    assert len(used) == (480 if remainder == "drop" else 503)
    assert len(second.repeats) == (9 if remainder == "pad" else 0)


def test_d4_a_length_that_no_world_size_divides_with_a_batch_size_per_rank():
    """The same with 8 ids per rank and nothing dropped."""
    first = Job(503, 4, 8, shuffle=True)
    first.run(6)
    second = Job(503, 3, 8, shuffle=True, state=first.state)
    second.run()
    assert sorted(first.used + second.used) == list(range(503))
    assert not second.repeats


def test_d5_a_position_survives_two_resizes_in_one_epoch():
    """4 ranks, then 2, then 8: what remains is exactly what was not consumed."""
    used, state = [], None
    for world_size, num_steps in ((4, 5), (2, 9), (8, None)):
        job = Job(503, world_size, 3, shuffle=True, state=state)
        job.run(num_steps)
        used += job.used
        state = job.state
    assert sorted(used) == list(range(503))


def test_hundreds_of_chains_of_stops_and_resizes():
    """Every item once in every epoch, across random stops, world sizes and batch sizes."""
    draw = random.Random(5)
    for chain in range(300):
        length = draw.choice([0, 1, 2, 3, 7, 13, 31, 64, 97])
        shuffle = draw.random() < 0.8
        used: dict[int, list[int]] = {}
        state, epoch = None, 0
        while epoch < 3:
            world_size = draw.randint(1, 6)
            if draw.random() < 0.5:
                sizes = {"global_batch_size": draw.randint(world_size, 4 * world_size)}
            else:
                sizes = {"batch_size": draw.randint(1, 5)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                job = Job(length, world_size, shuffle=shuffle, seed=chain, state=state, **sizes)
            for loader in job.loaders:
                loader.set_epoch(epoch)
            num_steps = draw.choice([None, None, 0, 1, 2, 5])
            job.run(num_steps)
            used.setdefault(epoch, []).extend(job.used)
            state = job.state
            epoch += num_steps is None
        assert all(sorted(items) == list(range(length)) for items in used.values()), chain


def test_a_constant_global_batch_gives_each_step_the_same_items():
    """24 ids per step in any order of world sizes: the steps hold what a straight run's do."""
    length = 24 * 12

    def steps(job, num_steps=None):
        found = []
        while (num_steps is None or len(found) < num_steps) and job.run(1):
            found.append(set(job.used[-24:]))
        return found

    straight = steps(Job(length, 1, global_batch_size=24, shuffle=True), 12)
    found, state = [], None
    for world_size, num_steps in ((4, 3), (3, 2), (8, 4), (1, 3)):
        job = Job(length, world_size, global_batch_size=24, shuffle=True, state=state)
        found += steps(job, num_steps)
        state = job.state
    assert found == straight


def test_a_resume_reads_nothing_that_lies_before():
    """In the middle of 10^12 items the first batch is there at once, and only it was read."""
    dataset = Numbers(10**12)
    loader = DataLoader(dataset, 32, shuffle=True, rank=2, world_size=4)
    state = {**loader.state_dict(), "consumed": 654_321_098_765}
    loader.load_state_dict(state)
    batch = next(iter(loader))
    assert dataset.num_read.value == 32
    order = order_of(Cursor(length=10**12, shuffle=True))
    assert batch.tolist() == [order.item(654_321_098_765 + 2 + 4 * i) for i in range(32)]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("takes_end", [False, True])
def test_a_state_from_the_end_of_an_epoch(num_workers, takes_end):
    """Saved after the last batch, before or after the iterator ended: no batch is left, then a whole epoch."""
    dataset = Numbers(20)
    first = DataLoader(dataset, 4)
    assert len(drain(first) if takes_end else take(first, 5)) == 5
    loader = resumed(first.state_dict(), dataset, 4, num_workers=num_workers)
    assert (loader.epoch, len(loader)) == (0, 0)
    assert drain(loader) == []
    assert (loader.epoch, len(loader)) == (0, 5)
    assert sorted(flat(drain(loader))) == list(range(20))
    assert loader.epoch == 1


def test_a_state_from_before_the_first_batch_of_an_epoch():
    """Saved when the next epoch's iterator was made: that epoch is whole."""
    dataset = Numbers(20)
    first = DataLoader(dataset, 4)
    drain(first)
    iter(first)
    loader = resumed(first.state_dict(), dataset, 4)
    assert loader.epoch == 1
    assert len(drain(loader)) == 5


@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_and_a_new_loop_go_on(persistent):
    """What the loop did not receive comes next, prefetched or not."""
    loader = DataLoader(Numbers(40), 4, num_workers=2, persistent_workers=persistent)
    assert flat(take(loader, 3)) == list(range(12))
    assert flat(take(loader, 2)) == list(range(12, 20))
    loader.set_epoch(0)
    assert flat(drain(loader)) == list(range(20, 40))
    loader.set_epoch(0)
    assert drain(loader) == []
    loader.set_epoch(5)
    assert flat(drain(loader)) == list(range(40))


def test_a_break_after_the_last_batch_ends_the_epoch():
    """A loop of a fixed number of steps that falls on the end goes on with the next epoch."""
    loader = DataLoader(Numbers(8), 4)
    take(loader, 2)
    assert flat(take(loader, 2)) == list(range(8))
    assert loader.epoch == 1


def test_a_look_can_be_undone():
    """Loading the state from before it gives the batch again."""
    loader = DataLoader(Numbers(8), 4)
    state = loader.state_dict()
    next(iter(loader))
    loader.load_state_dict(state)
    assert flat(drain(loader)) == list(range(8))


def test_set_epoch_of_the_same_epoch_leaves_a_running_loop_alone():
    """It moves nothing."""
    loader = DataLoader(Numbers(12), 4)
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(0)
    assert [batch.tolist() for batch in iterator] == [[4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    "move", [iter, lambda x: x.set_epoch(3), lambda x: x.load_state_dict(x.state_dict())]
)
def test_an_older_iterator_takes_nothing_from_a_newer_one(move):
    """It raises, and the next iterator still gives every batch."""
    loader = DataLoader(Numbers(40), 4, num_workers=1, persistent_workers=True)
    old = iter(loader)
    next(old)
    move(loader)
    with pytest.raises(RuntimeError, match="out of date"):
        next(old)
    begin = loader.cursor.consumed
    assert flat(drain(loader)) == list(range(begin, 40))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_that_has_given_nothing_yet_follows_the_position(num_workers):
    """Frameworks make theirs before they call back, where ``attach`` restores; one that was replaced raises."""
    loader = DataLoader(Numbers(40), 4, num_workers=num_workers, persistent_workers=num_workers > 0)
    state = loader.state_dict()
    replaced, early = iter(loader), iter(loader)
    loader.load_state_dict({**state, "consumed": 8})
    assert len(early) == 8
    assert flat(early) == list(range(8, 40))
    with pytest.raises(RuntimeError, match="out of date"):
        next(replaced)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_cannot_be_read_is_not_lost_silently(num_workers):
    """The error comes out, the position stays before the batch, and ``advance`` goes past it."""
    loader = DataLoader(Broken(20), 4, num_workers=num_workers)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    with pytest.raises(ValueError, match="item 9"):
        next(iterator)
    with pytest.raises(RuntimeError, match="after 8 items"):
        next(iterator)
    assert loader.state_dict()["consumed"] == 8
    loader.advance()
    assert flat(drain(loader)) == list(range(12, 20))


def test_len_is_that_of_the_pass_until_it_has_ended():
    """In the loop's body, last batch included, it counts this pass's batches; then a whole epoch's."""
    dataset = Numbers(40)
    first = DataLoader(dataset, 4)
    take(first, 7)
    loader = resumed(first.state_dict(), dataset, 4)
    assert [(len(loader), loader.steps_per_epoch) for _ in loader] == [(3, 10)] * 3
    assert len(loader) == 10


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_empty_data_set_gives_no_batches(num_workers):
    """In any epoch."""
    loader = DataLoader(Numbers(0), 4, num_workers=num_workers)
    assert [len(loader), drain(loader), drain(loader), loader.last_indices] == [0, [], [], []]


def test_repeats_are_marked():
    """Two items on four ranks: each rank gets one, and those that repeat say so."""
    job = Job(2, 4, shuffle=True)
    assert job.run() == 1
    assert sorted(job.used) == [0, 1]
    assert len(job.repeats) == 2
    assert [loader.num_padded for loader in job.loaders] == [0, 0, 1, 1]


def test_it_is_torchs_loader():
    """Attributes, collation and batched reading are torch's."""
    dataset = Numbers(10)
    loader = DataLoader(dataset, 4, num_workers=2, prefetch_factor=3, timeout=30, collate_fn=unchanged)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert loader.dataset is dataset
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor, len(loader)) == (4, 2, 3, 3)
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(DataLoader(dataset, 4, drop_last=True, collate_fn=unchanged)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    tensors = TensorDataset(torch.arange(6), torch.arange(6) * 2)
    for ours, theirs in zip(DataLoader(tensors, 4), torch.utils.data.DataLoader(tensors, 4), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    subset = Subset(tensors, [5, 1, 3])
    assert [batch[0].tolist() for batch in DataLoader(subset, 2)] == [[5, 1], [3]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_reads_whole_batches_gives_what_it_gives(num_workers):
    """The result of ``__getitems__`` reaches ``collate_fn`` as it is; in workers it gets a plain list."""
    loader = DataLoader(Columns(4), 2, num_workers=num_workers, collate_fn=unchanged)
    assert list(loader) == [{"x": [0, 1]}, {"x": [2, 3]}]


def test_worker_init_fn_reaches_the_data_set():
    """What it sets on the worker's data set counts."""
    loader = DataLoader(Numbers(4), 2, num_workers=1, worker_init_fn=set_offset)
    assert drain(loader) == [[100, 101], [102, 103]]


def test_spawned_workers_work():
    """Everything that workers need can be pickled."""
    dataset = TensorDataset(torch.arange(4))
    loader = DataLoader(dataset, 2, num_workers=1, multiprocessing_context="spawn")
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("persistent", [False, True])
def test_draws_in_workers_are_the_same_after_a_resume(persistent):
    """In the same batches, with another number of workers too; no two batches draw alike."""
    dataset = Draws(48)
    options = {"batch_size": 4, "shuffle": True, "seed": 3, "collate_fn": unchanged}
    straight_loader = DataLoader(dataset, num_workers=2, persistent_workers=persistent, **options)
    straight = [list(straight_loader), list(straight_loader)]
    first = DataLoader(dataset, num_workers=2, **options)
    iterator = iter(first)
    begun = [next(iterator) for _ in range(5)]
    second = resumed(first.state_dict(), dataset, num_workers=3, **options)
    assert begun + list(second) == straight[0]
    assert list(second) == straight[1]
    draws = [item[1:] for epoch in straight for batch in epoch for item in batch]
    assert all(len({draw[kind] for draw in draws}) == len(draws) for kind in range(3))


def test_draws_of_two_ranks_differ():
    """Each rank's batch has a seed of its own."""
    firsts = [
        next(iter(DataLoader(Draws(48), 4, num_workers=1, collate_fn=unchanged, rank=rank, world_size=2)))[0][
            1
        ]
        for rank in range(2)
    ]
    assert firsts[0] != firsts[1]


def test_draws_without_workers_go_on_with_the_process_generators():
    """With the generators restored beside the position they are the same after a resume."""
    dataset, options = Draws(48), {"batch_size": 4, "shuffle": True, "collate_fn": unchanged}
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    loader = DataLoader(dataset, **options)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state, generators = loader.state_dict(), generator_states()
    straight = list(iterator)
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])
    assert list(resumed(state, dataset, **options)) == straight


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterating_leaves_the_process_generators_alone(num_workers):
    """Else a resumed run, which begins one iterator more, would draw otherwise than a straight one."""
    before = generator_states()
    loader = DataLoader(Numbers(8), 4, shuffle=True, num_workers=num_workers)
    drain(loader)
    after = generator_states()
    assert before[0] == after[0]
    assert all(np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert torch.equal(before[2], after[2])


def generator_states():
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


@pytest.mark.parametrize(
    ("field", "options", "what_to_do"),
    [
        ("shuffle", {"sampler": [2, 1, 0], "shuffle": True}, "sampler is given"),
        ("shuffle", {"batch_sampler": [[2, 1], [0]], "shuffle": True}, "batch_sampler is given"),
        ("sampler", {"batch_sampler": [[2, 1], [0]], "sampler": [2, 1, 0]}, "batch_sampler is given"),
        ("batch_size", {"batch_sampler": [[2, 1], [0]], "batch_size": 2}, "batch_sampler is given"),
        ("in_order", {"in_order": False, "num_workers": 1}, "must be True"),
        ("drop_last", {"drop_last": True, "remainder": "pad"}, "left out"),
        ("batch_size", {"batch_size": None}, "whole number"),
        ("batch_size", {"batch_size": 2, "global_batch_size": 8}, "left out"),
        ("global_batch_size", {"global_batch_size": 3, "rank": 0, "world_size": 4}, "fewer ranks"),
        ("rank", {"rank": 4, "world_size": 4}, "count from 0"),
        ("rank", {"rank": 1}, "together"),
        ("shuffle", {"shuffle": "yes"}, "True or False"),
        ("seed", {"seed": 1.5}, "whole number"),
        ("remainder", {"remainder": "keep"}, "exact"),
    ],
)
def test_what_cannot_resume_is_refused(field, options, what_to_do):
    """The error names field and value, and says what to do."""
    with pytest.raises(ConfigError, match=what_to_do) as caught:
        DataLoader(Numbers(3), **options)
    assert caught.value.field == field
    assert f"{field}={options[field]!r}" in str(caught.value)


def test_an_iterable_style_data_set_is_refused():
    """By its type, with what to do instead."""

    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(ConfigError, match=r"Stream.*map-style.*state_dict"):
        DataLoader(Stream())


def test_torchs_default_for_shuffle_is_taken():
    """``shuffle=None`` means no shuffling, as in torch."""
    assert drain(DataLoader(Numbers(3), 3, shuffle=None)) == [[0, 1, 2]]


@pytest.mark.parametrize("change", [{"length": 21}, {"seed": 1}, {"shuffle": True}, {"format": 9}])
def test_a_state_of_other_data_is_refused_and_changes_nothing(change):
    """Neither the check nor the load moves the position; a running loop goes on."""
    loader = DataLoader(Numbers(20), 4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    for call in (loader.check_state_dict, loader.load_state_dict):
        with pytest.raises(CheckpointMismatchError):
            call({**state, **change})
    assert loader.state_dict() == state
    assert next(iterator).tolist() == [4, 5, 6, 7]


def test_another_batch_size_warns_once_on_rank_0():
    """And the rest of the epoch is still whole."""
    state = DataLoader(Numbers(20), 4).state_dict()
    with pytest.warns(UserWarning, match="batch_size=4 on 1 ranks, now batch_size=5") as caught:
        loader = resumed(state, Numbers(20), 5)
    assert len(caught) == 1
    assert [len(batch) for batch in loader] == [5] * 4
    resumed(state, Numbers(20), 5, rank=1, world_size=2)
    resumed(state, Numbers(20), 4, rank=0, world_size=2)


@given(
    st.integers(1, 3000) | st.sampled_from([10**9, 10**12 + 39, 2**62 + 1]),
    st.integers(0, 5),
    st.booleans(),
    st.data(),
)
@settings(max_examples=100)
def test_numpy_and_plain_python_agree_on_the_order(length, seed, shuffle, data):
    """Bit for bit, for repeats too."""
    order = order_of(Cursor(length=length, seed=seed, shuffle=shuffle))
    positions = data.draw(st.lists(st.integers(0, 2 * length), min_size=1, max_size=40))
    assert items_at(order, np.array(positions, np.uint64)).tolist() == [order.item(p) for p in positions]


@given(
    st.integers(0, 300),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["exact", "drop", "pad"]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=200)
def test_batches_made_many_at_a_time_are_those_of_the_plan(
    length, world_size, items, remainder, shuffle, data
):
    """Full steps are computed in blocks: each batch holds the items at the positions of its step and rank."""
    sizes = {"global_batch_size": data.draw(st.integers(world_size, world_size * items))}
    rank = data.draw(st.integers(0, world_size - 1))
    sampler = ElasticBatchSampler(
        Numbers(length), shuffle=shuffle, remainder=remainder, rank=rank, world_size=world_size, **sizes
    )
    sampler.advance(data.draw(st.integers(0, len(sampler))))
    rest = Rest(sampler.cursor, sampler.dealing)
    order = order_of(rest.cursor)
    if rest.num_steps:
        expected = [[order.item(p) for p in rest.positions(step, rank)] for step in range(rest.num_steps)]
        assert list(sampler) == expected
    sizes_found = [len(rest.span(step)) for step in range(rest.num_steps)]
    num_full = rest.num_full_steps
    assert sizes_found[:num_full] == [sampler.dealing.step_items] * num_full
    assert len(sizes_found) - num_full <= 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plain_loader_with_the_batch_sampler_resumes(num_workers):
    """``advance`` after each step is all it takes; later epochs are whole."""
    dataset = Numbers(50)
    straight = list(ElasticBatchSampler(dataset, 4, shuffle=True))
    sampler = ElasticBatchSampler(dataset, 4, shuffle=True)
    iterator = iter(torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers))
    begun = []
    for _ in range(5):
        begun.append(next(iterator).tolist())
        sampler.advance()
    assert sampler.last_indices == begun[-1]
    again = ElasticBatchSampler(dataset, 4, shuffle=True)
    again.load_state_dict(through_json(sampler.state_dict()))
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=again, num_workers=num_workers)
    assert len(loader) == 8
    rest = []
    for batch in loader:
        rest.append(batch.tolist())
        again.advance()
    assert begun + rest == straight
    assert sorted(flat(drain(loader))) == list(range(50))
    assert again.epoch == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_at_the_end_of_an_epoch_gives_the_empty_rest_first(num_workers):
    """Though torch makes two iterators of a sampler when it has workers."""
    dataset = Numbers(8)
    sampler = ElasticBatchSampler(dataset, 4)
    sampler.advance(2)
    again = ElasticBatchSampler(dataset, 4)
    again.load_state_dict(sampler.state_dict())
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=again, num_workers=num_workers)
    assert [len(drain(loader)), len(drain(loader)), again.epoch] == [0, 2, 1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_is_told_nothing_still_goes_through_the_epochs(num_workers):
    """Each loop is a whole epoch, in an order of its own; a saved state warns that it is behind."""
    dataset = Numbers(30)
    sampler = ElasticBatchSampler(dataset, 4, shuffle=True)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
    epochs = [flat(drain(loader)) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 3
    assert epochs[0] != epochs[1]
    assert sampler.epoch == 2
    with pytest.warns(RuntimeWarning, match="advance"):
        state = sampler.state_dict()
    assert (state["epoch"], state["consumed"]) == (2, 0)


@pytest.mark.parametrize("length", [0, 1, 3, 40, 41, 43, 47])
@pytest.mark.parametrize("remainder", ["exact", "drop", "pad"])
def test_index_samplers_make_equal_batches_on_all_ranks(length, remainder):
    """Under torch's own batching: the steps of the plan, every item once, repeats marked."""
    dataset, world_size = Numbers(length), 4
    used, counts = [], set()
    for rank in range(world_size):
        sampler = ElasticSampler(
            dataset, 5, shuffle=True, remainder=remainder, rank=rank, world_size=world_size
        )
        loader = torch.utils.data.DataLoader(dataset, 5, sampler=sampler)
        counts.add(len(loader))
        num_indices = len(sampler)
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            sampler.advance()
            assert sampler.last_indices == batches[-1]
            used += batches[-1][: len(batch) - sampler.num_padded]
        assert len(flat(batches)) == num_indices
        assert sampler.cursor.consumed == (length if batches else 0)
    assert len(counts) == 1
    if remainder == "drop":
        assert len(used) == len(set(used)) == length // 20 * 20
    else:
        assert sorted(used) == list(range(length))


def test_an_index_sampler_resumes_at_another_world_size():
    """2 ranks, then 3: every item once."""
    dataset, used, state = Numbers(100), [], None
    for world_size, num_steps in ((2, 7), (3, 100)):
        samplers = [
            ElasticSampler(dataset, 4, shuffle=True, rank=r, world_size=world_size) for r in range(world_size)
        ]
        for sampler in samplers:
            if state:
                sampler.load_state_dict(state)
            loader = torch.utils.data.DataLoader(dataset, 4, sampler=sampler)
            for _, batch in zip(range(num_steps), loader, strict=False):
                sampler.advance()
                used += batch.tolist()[: len(batch) - sampler.num_padded]
        assert len({json.dumps(sampler.state_dict()) for sampler in samplers}) == 1
        state = samplers[0].state_dict()
    assert sorted(used) == list(range(100))


def test_an_index_sampler_refuses_batches_of_unequal_size():
    """A global batch that the ranks do not divide needs the batch sampler."""
    with pytest.raises(ConfigError, match="ElasticBatchSampler"):
        ElasticSampler(Numbers(9), global_batch_size=5, rank=0, world_size=2)


def test_advance_stops_at_the_epochs_end():
    """Counting more batches than there are is a mistake of the caller's."""
    sampler = ElasticBatchSampler(Numbers(9), 4)
    sampler.advance(3)
    with pytest.raises(ConfigError, match="at most the 0 that remain of epoch 0"):
        sampler.advance()


def test_rank_and_world_size_come_from_torch_distributed():
    """Where it is initialised and nothing is given."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=5)
    try:
        assert take(DataLoader(Numbers(50), 2), 1) == [[2, 7]]
        assert take(DataLoader(Numbers(50), 2, rank=0, world_size=1), 1) == [[0, 1]]
    finally:
        torch.distributed.destroy_process_group()
    assert take(DataLoader(Numbers(50), 2), 1) == [[0, 1]]
