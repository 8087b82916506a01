"""Loaders that are not raycheck's own, passed to ``attach``: exact, or refused with the reason."""

import random
import time
import warnings
from collections import Counter

import pytest
import torch
import torch.utils.data
from ray.train.torch.train_loop_utils import _WrappedDataLoader
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

import raycheck
from raycheck.data.adopt import PerRank, adopt, ray_data
from raycheck.data.loader import DataLoader
from raycheck.data.sampler import ElasticBatchSampler, ElasticSampler
from raycheck.errors import CheckpointMismatchError, ConfigError
from raycheck.runtime import worker
from raycheck.state.codec import Codec
from tests.data.test_loader import Numbers, drain, flat, through_json

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # torchdata's affair.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def stored(value):
    """Return a state as a checkpoint gives it back."""
    codec, tensors = Codec(()), {}

    def on_tensor(path, tensor):
        tensors[path] = tensor.clone()
        return path

    text = codec.to_bytes({"loader": codec.encode(value, "loader", on_tensor)})
    return codec.loads(text, tensors, lambda _: True)["loader"]


@pytest.fixture
def attach():
    """``raycheck.attach`` in a process without a run: it counts and saves nothing."""

    def make(**state):
        worker.set_context(None)
        return raycheck.attach(optional=True, **state)

    yield make
    worker.set_context(None)


def make(kind, dataset, batch_size, *, num_workers=0, persistent=False, **options):
    """Return (what is iterated, what is passed to attach(), what tells the items)."""
    workers = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    if kind == "prepared raycheck":
        base = DataLoader(dataset, batch_size, **workers, **options)
        loader = _WrappedDataLoader(base, torch.device("cpu"), False)
        return loader, loader, base
    if kind.endswith("index sampler"):
        sampler = ElasticSampler(dataset, batch_size, **options)
        loader = TorchLoader(dataset, batch_size, sampler=sampler, **workers)
    else:
        sampler = ElasticBatchSampler(dataset, batch_size, **options)
        loader = TorchLoader(dataset, batch_sampler=sampler, **workers)
    if kind.startswith("prepared"):
        loader = _WrappedDataLoader(loader, torch.device("cpu"), False)
    return loader, loader, sampler


KINDS = [
    "batch sampler",
    "index sampler",
    "prepared batch sampler",
    "prepared index sampler",
    "prepared raycheck",
]


class Job:
    """All ranks of a job in one process, on loaders of one kind."""

    def __init__(self, kind, length, world_size, batch_size, state=None, **options):
        made = [
            make(kind, Numbers(length), batch_size, rank=rank, world_size=world_size, **options)
            for rank in range(world_size)
        ]
        self.loaders, self.told = [one[0] for one in made], [one[2] for one in made]
        adopted = [adopt({"loader": one[1]}, rank=r, world_size=world_size) for r, one in enumerate(made)]
        self.states, self.watches = [one[0]["loader"] for one in adopted], [one[1] for one in adopted]
        for part in self.states if state is not None else ():
            part.check_state_dict(state)
            part.load_state_dict(state)
        self.used, self.repeats = [], []

    def run(self, num_steps=None):
        iterators = [iter(loader) for loader in self.loaders]
        num_done = 0
        while num_steps is None or num_done < num_steps:
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                assert batches == [None] * len(batches), "ranks differ in their number of steps"
                break
            num_done += 1
            for told, batch in zip(self.told, batches, strict=True):
                assert batch.tolist() == told.last_indices
                end = len(batch) - told.num_padded
                self.used += batch.tolist()[:end]
                self.repeats += batch.tolist()[end:]
            assert len({watch.place() for watch in self.watches}) == 1
        return num_done

    @property
    def state(self):
        states = [stored(state.state_dict()) for state in self.states]
        assert all(state == states[0] for state in states)
        return states[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_d1_d2_d3_plain_loaders_resume_in_a_later_epoch_at_the_batch_after_the_last(kind, num_workers):
    """Stopped in epoch 1 with batches prefetched: the rest of it, then whole epochs, in the straight run's order."""
    straight = DataLoader(Numbers(100), 4, shuffle=True)
    epochs = [drain(straight) for _ in range(4)]
    options = {"num_workers": num_workers, "persistent": True, "shuffle": True}
    first = Job(kind, 100, 1, 4, **options)
    first.run()
    first.run(7)
    assert first.used == flat(epochs[0]) + flat(epochs[1][:7])
    second = Job(kind, 100, 1, 4, state=first.state, **options)
    assert (second.told[0].epoch, len(second.loaders[0])) == (1, 18)
    for epoch, num_steps in ((1, 18), (2, 25), (3, 25)):
        second.states[0].set_epoch(epoch)
        assert second.run() == num_steps
    assert second.used == flat(epochs[1][7:]) + flat(epochs[2]) + flat(epochs[3])


@pytest.mark.parametrize("kind", KINDS)
def test_d4_d5_plain_loaders_go_on_with_other_numbers_of_workers(kind):
    """503 ids on 4 ranks, then 2, 8 and 3: each once, and what is filled up is marked."""
    used, state = [], None
    for world_size, num_steps in ((4, 5), (2, 9), (8, 2), (3, None)):
        job = Job(kind, 503, world_size, 3, shuffle=True, state=state)
        job.run(num_steps)
        used += job.used
        state = job.state
    assert sorted(used) == list(range(503))
    assert (
        len(job.repeats) == (1 if "index" in kind and (503 - 60 - 54 - 48) % 9 in (1, 2) else 0)
        or len(job.repeats) < 3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_k1_positions_of_two_ranks_restore_on_four_and_on_one(kind):
    """No rank looks for a state of its own: the position is the same for all."""
    first = Job(kind, 40, 2, 2, shuffle=True)
    first.run(3)
    for world_size in (4, 1):
        job = Job(kind, 40, world_size, 2, shuffle=True, state=first.state)
        job.run()
        assert sorted(first.used + job.used) == list(range(40))


def test_hundreds_of_chains_of_stops_and_resizes_on_every_kind_of_loader():
    """Each item counted in each epoch, and the audit of the accounts finds the same."""
    draw = random.Random(11)
    for chain in range(200):
        kind = draw.choice(KINDS)
        length = draw.choice([1, 2, 3, 7, 13, 31, 64, 97])
        used: dict[int, list[int]] = {}
        state, epoch = None, 0
        while epoch < 3:
            world_size = draw.randint(1, 5)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                job = Job(kind, length, world_size, draw.randint(1, 4), shuffle=True, seed=chain, state=state)
            for part in job.states:
                part.set_epoch(epoch)
            num_steps = draw.choice([None, None, 0, 1, 2, 5])
            job.run(num_steps)
            used.setdefault(epoch, []).extend(job.used)
            state = job.state
            epoch += num_steps is None
        counts = {epoch: Counter(items) for epoch, items in used.items()}
        assert all(count == Counter(range(length)) for count in counts.values()), (chain, kind)


def test_batches_that_are_gathered_for_one_step_all_count(attach):
    """Gradient accumulation: three batches to a step, workers far ahead."""
    dataset = Numbers(96)
    sampler = ElasticBatchSampler(dataset, 4, shuffle=True)
    loader = TorchLoader(dataset, batch_sampler=sampler, num_workers=2, prefetch_factor=8)
    ckpt = attach(loader=loader)
    for number, _ in enumerate(loader, 1):
        if number % 3 == 0:
            ckpt.step()
            assert ckpt._watch.place() == f"loader: epoch 0 after {4 * number} items"
        if number == 12:
            break
    state = stored(ckpt._tree.capture().values["loader"])
    assert state["consumed"] == 48


def test_a_sampler_alone_counts_a_batch_per_step(attach):
    """ckpt.step() advances what was passed without its loader, and not what is advanced by hand."""
    dataset = Numbers(40)
    for by_hand in (False, True):
        sampler = ElasticSampler(dataset, 4, shuffle=True)
        loader = TorchLoader(dataset, 4, sampler=sampler, num_workers=2)
        ckpt = attach(sampler=sampler)
        for epoch in ckpt.epochs(2):
            for number, batch in enumerate(loader, 1):
                if by_hand:
                    sampler.advance()
                ckpt.step()
                assert sampler.last_indices == batch.tolist()
                assert (sampler.epoch, sampler.cursor.consumed) == (epoch, 4 * number)


def test_counting_twice_is_refused(attach):
    """advance() beside a loader that counts, or after ckpt.step() has counted; more steps than batches."""
    dataset = Numbers(8)
    sampler = ElasticBatchSampler(dataset, 4)
    attach(loader=TorchLoader(dataset, batch_sampler=sampler))
    with pytest.raises(ConfigError, match=r"the loader counts.*remove the calls"):
        sampler.advance()
    sampler = ElasticBatchSampler(dataset, 4)
    ckpt = attach(sampler=sampler)
    for _ in TorchLoader(dataset, batch_sampler=sampler):
        ckpt.step()
    with pytest.raises(ConfigError, match=r"ckpt.step\(\) counts.*remove the calls"):
        sampler.advance()
    with pytest.raises(ConfigError, match=r"no batch left. Pass the DataLoader"):
        ckpt.step()


@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_from_before_the_position_was_set_is_out_of_date(kind):
    """It would count batches of another place."""
    job = Job(kind, 40, 1, 4)
    (loader,) = job.loaders
    old = iter(loader)
    next(old)
    state = job.state
    new = iter(loader)
    with pytest.raises(RuntimeError, match="out of date"):
        next(old)
    next(new)
    job.states[0].load_state_dict(state)
    with pytest.raises(RuntimeError, match="out of date"):
        next(new)
    assert next(iter(loader)).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_fails_is_not_counted(kind):
    """Item 9 cannot be read: the position stays before its batch, and the iterator is used up."""

    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 9:
                raise ValueError("item 9 is unreadable")
            return index

    loader, passed, _ = make(kind, Broken(20), 4)
    adopted, _ = adopt({"loader": passed}, rank=0, world_size=1)
    batches = iter(loader)
    num_good = 1 if kind.startswith("prepared") else 2
    for _ in range(num_good):
        next(batches)
    # A prepared loader fails when it fetches the batch ahead, and gives out none.
    with pytest.raises(ValueError, match="item 9"):
        next(batches)
    assert adopted["loader"].state_dict()["consumed"] == 4 * num_good
    with pytest.raises(RuntimeError, match="out of date"):
        next(batches)


def test_iterating_an_adopted_loader_leaves_the_process_generators_alone():
    """A resumed run begins one iterator more than a straight one."""
    loader, passed, _ = make("batch sampler", Numbers(8), 4)
    adopt({"loader": passed}, rank=0, world_size=1)
    before = torch.get_rng_state()
    drain(loader)
    assert torch.equal(before, torch.get_rng_state())


class Stream(IterableDataset):
    """Numbers in order, with a position of its own."""

    def __init__(self, length, *, first=0, step=1):
        self.length, self.first, self.step, self.consumed = length, first, step, 0

    def __iter__(self):
        while self.first + self.consumed * self.step < self.length:
            self.consumed += 1
            yield self.first + (self.consumed - 1) * self.step
        self.consumed = 0

    def state_dict(self):
        return {"consumed": self.consumed}

    def load_state_dict(self, state):
        self.consumed = state["consumed"]


def elastic(dataset, **options):
    return ElasticBatchSampler(dataset, 4, **options)


@pytest.mark.parametrize(
    ("loader", "field", "message"),
    [
        (
            lambda d: TorchLoader(d, 4),
            "sampler",
            "SequentialSampler has no position.*use raycheck.DataLoader",
        ),
        (lambda d: TorchLoader(d, 4, shuffle=True), "sampler", "RandomSampler has no position"),
        (
            lambda d: TorchLoader(d, sampler=DistributedSampler(d, 2, 0)),
            "sampler",
            "DistributedSampler has no position",
        ),
        (lambda d: TorchLoader(d, batch_sampler=[[0], [1]]), "batch_sampler", "list has no position"),
        (
            lambda d: _WrappedDataLoader(
                TorchLoader(d, sampler=DistributedSampler(d, 2, 0)), torch.device("cpu"), False
            ),
            "sampler",
            "add_dist_sampler=False",
        ),
        (
            lambda d: TorchLoader(d, 4, sampler=ElasticSampler(d, 5)),
            "batch_size",
            "batch_size=4: must be 5, as the ElasticSampler",
        ),
        (
            lambda d: TorchLoader(d, 4, sampler=ElasticSampler(d, 4), drop_last=True),
            "drop_last",
            'remainder="drop"',
        ),
        (
            lambda d: TorchLoader(d, batch_size=None, sampler=ElasticSampler(d, 1)),
            "batch_size",
            "batch_size=None: must be batches",
        ),
        (
            lambda d: TorchLoader(d, batch_sampler=MyBatches(ElasticSampler(d, 4), 4, drop_last=False)),
            "batch_sampler",
            "MyBatches: must be batches of a fixed size",
        ),
        (lambda d: TorchLoader(d, batch_sampler=elastic(Numbers(7))), "dataset", "7 items"),
        (
            lambda d: TorchLoader(d, batch_sampler=elastic(d), num_workers=1, in_order=False),
            "in_order",
            "must be True",
        ),
        (
            lambda d: TorchLoader(Stream(8), num_workers=1),
            "loader",
            "num_workers=0, not 1.*StatefulDataLoader",
        ),
        (lambda d: TorchLoader(EndlessStream()), "loader", "has no state_dict"),
        (lambda d: EndlessStream(), "loader", "otherwise it has no position"),
    ],
)
def test_what_cannot_be_exact_is_refused(loader, field, message):
    """The error names field and value, and says what to do instead."""
    made = loader(Numbers(8))
    with pytest.raises(ConfigError, match=message) as caught:
        adopt({"loader": made}, rank=0, world_size=1)
    assert caught.value.field == field


class MyBatches(BatchSampler):
    pass


class EndlessStream(IterableDataset):
    def __iter__(self):
        yield 1


def test_torch_itself_refuses_a_sampler_with_shuffle():
    """Nothing of ours is needed for that."""
    with pytest.raises(ValueError, match="mutually exclusive"):
        TorchLoader(Numbers(8), 4, sampler=ElasticSampler(Numbers(8), 4), shuffle=True)


def test_a_position_in_changed_data_is_refused_and_other_batches_are_warned_of_once():
    """Length and seed: an error before anything changes. Batch size: one warning, on rank 0."""
    first = Job("batch sampler", 40, 1, 4, seed=1)
    first.run(2)
    for length, seed, field in ((41, 1, "length"), (40, 2, "seed")):
        with pytest.raises(CheckpointMismatchError) as caught:
            Job("batch sampler", length, 1, 4, seed=seed, state=first.state)
        assert caught.value.field == field
    with pytest.warns(UserWarning, match="batch size changed") as caught:
        Job("batch sampler", 40, 2, 5, seed=1, state=first.state)
    assert len(caught) == 1


def test_items_dealt_to_other_ranks_than_the_jobs_are_warned_of():
    """A loader made before the process group: every rank would get everything."""
    loader = DataLoader(Numbers(8), 4)
    with pytest.warns(UserWarning, match="every rank gets all of them"):
        adopt({"loader": loader}, rank=0, world_size=2)


def test_other_state_is_left_as_it_is():
    """Modules, optimizers, tensors, values; raycheck's own loaders."""
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "step": 3, "loader": DataLoader(Numbers(8), 4), "numbers": [1]}
    adopted, watch = adopt(state, rank=0, world_size=1)
    assert all(adopted[name] is value for name, value in state.items())
    assert watch.place() == "loader: epoch 0 after 0 items"
    _, watch = adopt({"model": model}, rank=0, world_size=1)
    assert (watch.place(), watch.accounts()) == ("", {})


@pytest.mark.parametrize("num_used", [0, 3, 4])
def test_a_stream_with_a_position_of_its_own_in_a_plain_loader(num_used):
    """Without workers the data set's state is that behind the last batch."""
    first = TorchLoader(Stream(16), 4)
    adopted, watch = adopt({"loader": first}, rank=0, world_size=1)
    batches = iter(first)
    begun = [next(batches).tolist() for _ in range(num_used)]
    again = TorchLoader(Stream(16), 4)
    taken, _ = adopt({"loader": again}, rank=0, world_size=1)
    taken["loader"].load_state_dict(stored(adopted["loader"].state_dict()))
    assert flat(begun) + flat(drain(again)) == list(range(16))
    assert flat(drain(again)) == list(range(16))
    assert watch.place() == "", "ranks need not be at one place in streams of their own"


def test_a_state_per_rank_is_refused_at_another_world_size():
    """Before anything changes; with the numbers and what to do."""
    saved = adopt({"loader": Stream(8)}, rank=1, world_size=2)[0]["loader"].state_dict()
    for world_size in (1, 4):
        part = adopt({"loader": Stream(8)}, rank=0, world_size=world_size)[0]["loader"]
        with pytest.raises(CheckpointMismatchError, match=r"2 ranks and there are.*raycheck.DataLoader"):
            part.check_state_dict(saved)
        with pytest.raises(CheckpointMismatchError, match="another kind of loader"):
            part.check_state_dict({"consumed": 3})


class TestStatefulDataLoader:
    """torchdata's loader, through its own state."""

    def make(self, dataset, num_workers):
        stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
        options = {"prefetch_factor": 4} if num_workers else {}
        loader = stateful.StatefulDataLoader(
            dataset, 4, shuffle=not isinstance(dataset, IterableDataset), num_workers=num_workers, **options
        )
        adopted, watch = adopt({"loader": loader}, rank=0, world_size=1)
        assert isinstance(adopted["loader"], PerRank)
        assert watch.place() == ""
        return loader, adopted["loader"]

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("num_used", [0, 3, 9, 10])
    def test_it_resumes_behind_the_last_batch_that_the_loop_received(self, num_workers, num_used):
        """In the middle, after the last batch, and before the first; the epoch after it is whole."""
        data = TensorDataset(torch.arange(40))
        first, part = self.make(data, num_workers)
        part.set_epoch(2)
        batches = iter(first)
        begun = [next(batches)[0].tolist() for _ in range(num_used)]
        again, taken = self.make(data, num_workers)
        taken.load_state_dict(stored(part.state_dict()))
        assert taken.epoch == 2
        rest = [batch[0].tolist() for batch in again]
        assert sorted(flat(begun) + flat(rest)) == list(range(40))
        assert sorted(flat(batch[0].tolist() for batch in again)) == list(range(40))

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_an_epoch_that_was_finished_does_not_come_again(self, num_workers):
        """Saved behind the loop, before the next epoch."""
        data = TensorDataset(torch.arange(8))
        first, part = self.make(data, num_workers)
        part.set_epoch(0)
        list(first)
        again, taken = self.make(data, num_workers)
        taken.load_state_dict(stored(part.state_dict()))
        assert taken.epoch == 1
        assert sorted(flat(batch[0].tolist() for batch in again)) == list(range(8))

    def test_a_stream_in_workers(self):
        """The workers' positions are in the loader's state."""
        first, part = self.make(Stream(24), 1)
        batches = iter(first)
        begun = [next(batches).tolist() for _ in range(2)]
        again, taken = self.make(Stream(24), 1)
        taken.load_state_dict(stored(part.state_dict()))
        assert flat(begun) + flat(drain(again)) == list(range(24))

    def test_with_a_sampler_of_ours_there_would_be_two_positions(self):
        """Refused."""
        stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
        loader = stateful.StatefulDataLoader(Numbers(8), batch_sampler=elastic(Numbers(8)))
        with pytest.raises(ConfigError, match="a plain torch DataLoader where the sampler is raycheck's"):
            adopt({"loader": loader}, rank=0, world_size=1)

    def test_prepared_it_would_lose_the_batch_that_is_held_back(self):
        """Refused."""
        loader, _ = self.make(TensorDataset(torch.arange(8)), 0)
        prepared = _WrappedDataLoader(loader, torch.device("cpu"), False)
        with pytest.raises(ConfigError, match="fetches one batch ahead"):
            adopt({"loader": prepared}, rank=0, world_size=1)


class TestHuggingFace:
    """Data sets of the ``datasets`` package."""

    def columns(self):
        datasets = pytest.importorskip("datasets", reason="datasets is not installed")
        return datasets.Dataset.from_dict({"x": list(range(40))})

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_map_style_one_is_like_any_other(self, num_workers):
        """Through raycheck.DataLoader, stopped and resumed on two ranks."""
        data = self.columns().with_format("torch")
        first = DataLoader(data, 4, shuffle=True, num_workers=num_workers)
        used = [batch["x"].tolist() for _, batch in zip(range(3), first, strict=False)]
        for rank in range(2):
            loader = DataLoader(data, 4, shuffle=True, num_workers=num_workers, rank=rank, world_size=2)
            loader.load_state_dict(through_json(first.state_dict()))
            used += [batch["x"].tolist() for batch in loader]
        assert sorted(flat(used)) == list(range(40))

    @pytest.mark.parametrize("is_torch", [False, True])
    def test_an_iterable_one_goes_on_through_its_own_state(self, is_torch):
        """Passed itself, or in a plain loader without workers."""

        def make():
            stream = self.columns().to_iterable_dataset(num_shards=4)
            stream = stream.with_format("torch") if is_torch else stream
            loader = TorchLoader(stream, 4) if is_torch else stream
            return loader, adopt({"loader": loader}, rank=0, world_size=1)[0]["loader"]

        def values(batches):
            return flat(batch["x"].tolist() if is_torch else [batch["x"]] for batch in batches)

        first, part = make()
        part.set_epoch(1)
        used = values(batch for _, batch in zip(range(5), first, strict=False))
        again, taken = make()
        taken.load_state_dict(stored(part.state_dict()))
        assert taken.epoch == 1
        assert sorted(used + values(again)) == list(range(40))
        taken.set_epoch(2)
        assert sorted(values(again)) == list(range(40)), "the epoch after it is whole"


class WithState:
    """As a Ray would be whose iterators have a state."""

    def __init__(self):
        self.state = {"at": 0}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = state


def test_ray_data_uses_the_iterators_own_state_where_there_is_one():
    """Per rank, like any other state of that kind."""
    first, again = WithState(), WithState()
    first.state["at"] = 7
    saved = adopt({"data": ray_data(first)}, rank=1, world_size=2)[0]["data"].state_dict()
    part = adopt({"data": ray_data(again)}, rank=1, world_size=2)[0]["data"]
    part.load_state_dict(stored(saved))
    assert again.state == {"at": 7}
    with pytest.raises(CheckpointMismatchError, match="saved by 2 ranks"):
        adopt({"data": ray_data(again)}, rank=0, world_size=3)[0]["data"].load_state_dict(saved)


def test_what_is_prefetched_far_ahead_is_not_in_a_plain_loaders_position():
    """Four workers with eight batches each; a slow loop."""
    dataset = Numbers(400)
    sampler = ElasticBatchSampler(dataset, 4, shuffle=True)
    loader = TorchLoader(dataset, batch_sampler=sampler, num_workers=4, prefetch_factor=8)
    adopted, _ = adopt({"loader": loader}, rank=0, world_size=1)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    deadline_s = time.monotonic() + 60
    while dataset.num_read.value < 4 * 20:
        assert time.monotonic() < deadline_s, "workers do not prefetch"
        time.sleep(0.005)
    assert adopted["loader"].state_dict()["consumed"] == 20


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterator_that_was_made_before_is_told_of(num_workers):
    """Nobody can count what it gives out; a look before attach() is no reason to say so."""
    loader = torch.utils.data.DataLoader(
        list(range(40)), batch_sampler=ElasticBatchSampler(range(40), 4), num_workers=num_workers
    )
    early = iter(loader)
    _, watch = adopt({"train": loader}, rank=0, world_size=1)
    next(early)
    with pytest.warns(
        RuntimeWarning, match="train: the loop takes batches from an iterator that was made before"
    ):
        watch.end_step()
    next(early)
    watch.end_step()
    again = torch.utils.data.DataLoader(
        list(range(40)), batch_sampler=ElasticBatchSampler(range(40), 4), num_workers=num_workers
    )
    next(iter(again))
    adopted, watch = adopt({"train": again}, rank=0, world_size=1)
    for number, _ in enumerate(again, 1):
        watch.end_step()
        assert adopted["train"].cursor.consumed == 4 * number
    assert number == 10
