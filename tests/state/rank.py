"""One rank's worker side without Ray and without a store, and what tests look at."""

from __future__ import annotations

import safetensors.torch
import torch

from raycheck.core.layout import Entry
from raycheck.core.page import Plan
from raycheck.state.codec import Codec
from raycheck.state.live import Live
from raycheck.state.restore import Restorer
from raycheck.state.segment import Segment
from raycheck.state.sharded import Shards
from raycheck.state.snapshot import Snapshot, Snapshotter
from raycheck.state.tree import StateTree


class Rank:
    """One rank's worker side, with its shards kept in memory instead of a store."""

    def __init__(
        self,
        rank=0,
        world_size=1,
        *,
        overlap=True,
        codec=None,
        budget_bytes=None,
        strict=True,
        rename=None,
        copier=None,
        **state,
    ):
        self.rank, self.world_size, self.state = rank, world_size, state
        self.codec = codec or Codec()
        self.tree = StateTree(state, strict=strict, rename=rename)
        self.segment = Segment()
        self.images = []
        self.snapshotter = Snapshotter(
            self.tree,
            self.segment,
            rank=rank,
            world_size=world_size,
            codec=self.codec,
            overlap=overlap,
            on_layout=self.images.append,
            budget_bytes=budget_bytes,
            copier=copier,
        )
        self.num_plans = 0

    def begin(self):
        self.num_plans += 1
        self.snapshotter.begin(Plan(self.num_plans, self.num_plans))

    def save(self) -> tuple[bytes, tuple[Entry, ...]]:
        self.begin()
        outcome = self.snapshotter.settle(block=True)
        assert isinstance(outcome, Snapshot)
        return self.shard()

    def shard(self):
        image = self.images[-1]
        return bytes(self.segment.arena[: image.num_bytes]), image.entries

    def restore(self, shards, *, has_group=False):
        """Restore from shards; return how many bytes of them were read."""
        entries = [entry for _, shard_entries in shards for entry in shard_entries]
        restorer = Restorer(
            self.tree,
            self.segment,
            entries,
            saved_world_size=len(shards),
            rank=self.rank,
            world_size=self.world_size,
            codec=self.codec,
            has_group=has_group,
        )
        num_bytes = 0
        for read in restorer.plan():
            num_bytes += read.num_bytes
            data = shards[read.rank][0][read.source : read.source + read.num_bytes]
            self.segment.arena[read.destination : read.destination + read.num_bytes] = data
        restorer.check()
        restorer.load(("test",))
        self.unmatched = restorer.unmatched
        return num_bytes

    def close(self):
        self.snapshotter.close()
        self.segment.close()

    def live(self):
        """Return copies of all live tensors by name."""
        capture = self.tree.capture()
        self.snapshotter._take_values(capture)
        live = Live.of(capture, Shards(self.world_size))
        return {name: tensor.detach().clone() for name, tensor in zip(live.names, live.tensors, strict=True)}

    def saved(self):
        """Return the tensors in the arena by name."""
        loaded = safetensors.torch.load(self.shard()[0])
        return {name.partition("@rank")[0]: tensor for name, tensor in loaded.items()}

    def holds(self, expected):
        """Return whether the arena holds exactly these tensors."""
        saved = self.saved()
        del saved["values"]
        return saved.keys() == expected.keys() and all(
            torch.equal(saved[name], tensor) for name, tensor in expected.items()
        )

    def holds_pieces(self, expected):
        """Return whether what the arena holds is part of these tensors, whose rows it may split."""
        entries = {entry.name: entry for entry in self.images[-1].entries}
        saved = self.saved()
        del saved["values"]
        for name, tensor in saved.items():
            whole = expected[name]
            if tensor.shape != whole.shape:
                first = entries[name].offset[0]
                whole = whole[first : first + len(tensor)]
            if not torch.equal(tensor, whole):
                return False
        return bool(saved)


class Gate:
    """Holds back the next copy of a rank until it is let go."""

    def __init__(self, rank):
        self._snapshotter, self._jobs = rank.snapshotter, rank.snapshotter._jobs
        rank.snapshotter._jobs = self
        self._held = []

    def get(self):
        """For a copy thread that comes here before it waits at the queue."""
        return self._jobs.get()

    def put(self, job):
        self._held.append(job)
        self._snapshotter._jobs = self._jobs

    def open(self):
        self._jobs.put(self._held.pop())


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))


def train(model, optimizer, steps=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )
