"""Snapshots of tensors that a device copies, with a device played by the test, and on a GPU where one is.

The played device does its work when the test lets it, in the order in which it
was launched, as a GPU does: copies that were launched before an update copy
what was there before it, however late they run.
"""

import threading

import pytest
import torch

from raycheck.core.page import Plan
from raycheck.state.device import CudaCopier, fingerprint
from raycheck.state.snapshot import Discarded, Snapshot
from tests.state.rank import Rank

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


class PlayedDevice:
    """A queue of work; large CPU tensors count as the device's."""

    def __init__(self):
        self.queue = []
        self.launched = []
        self.num_held_back = 0
        self.pinned = []

    def owns(self, tensor):
        return tensor.numel() >= 8

    def pin(self, address, num_bytes):
        self.pinned.append((address, num_bytes))

    def unpin(self, address):
        self.pinned = [pinned for pinned in self.pinned if pinned[0] != address]

    def launch(self, copies, to_fingerprint=()):
        transfer = PlayedTransfer(self, list(copies), list(to_fingerprint))
        self.queue.append(transfer)
        self.launched.append(transfer)
        return transfer

    def run_until(self, last):
        """Do what has been launched up to this; the host does not know of it yet."""
        while last in self.queue:
            transfer = self.queue.pop(0)
            for source, target in transfer.copies:
                target.copy_(source)
            transfer.prints = b"".join(fingerprint(t).numpy().tobytes() for t in transfer.to_fingerprint)

    def finish(self):
        """Do everything, and let the host know."""
        for transfer in self.launched:
            transfer.wait()


class PlayedTransfer:
    def __init__(self, device, copies, to_fingerprint):
        self.device, self.copies, self.to_fingerprint = device, copies, to_fingerprint
        self.is_done = False
        self.held_s = 0.0
        self.prints = b""

    def hold_back(self):
        # What the test does next stands for work that is launched behind the copies: so they run first.
        if not self.is_done:
            self.device.run_until(self)
            self.device.num_held_back += 1
            self.held_s = 0.25

    def wait(self):
        self.device.run_until(self)
        self.is_done = True

    def held_back_s(self):
        return self.held_s

    def fingerprints(self):
        return self.prints


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def update(model, optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(5, 4, generator=generator)).square().mean().backward()
    optimizer.step()


@pytest.fixture
def device():
    return PlayedDevice()


def test_the_update_follows_the_copies_and_nobody_waits(device):
    """The hook returns while the device is still copying; the snapshot is what was there before it."""
    model, optimizer = make()
    update(model, optimizer)
    rank = Rank(copier=device, model=model, optimizer=optimizer)
    expected = rank.live()
    rank.begin()
    assert device.num_held_back == 1, "batch norm's buffers, which the next forward changes"
    update(model, optimizer, seed=1)
    assert device.num_held_back == 3, "the hook, for both"
    assert rank.snapshotter.settle(block=False) is None, "the device has not finished"
    outcome = rank.snapshotter.settle(block=True)
    assert isinstance(outcome, Snapshot)
    assert outcome.stall_s >= 0.5, "what the device says it stood still for"
    assert rank.holds(expected)
    rank.close()


def test_copies_that_have_arrived_give_the_verdict_in_the_hook(device):
    """As for host memory."""
    model, optimizer = make()
    update(model, optimizer)
    rank = Rank(copier=device, model=model, optimizer=optimizer)
    expected = rank.live()
    rank.begin()
    device.finish()
    update(model, optimizer, seed=1)
    assert isinstance(rank.snapshotter.settle(block=False), Snapshot)
    assert rank.holds(expected)


def test_a_change_that_bypasses_the_hook_is_detected_before_the_update(device):
    """Versions are compared in the hook: afterwards the update itself has moved them."""
    model, optimizer = make()
    update(model, optimizer)
    rank = Rank(copier=device, model=model, optimizer=optimizer)
    rank.begin()
    with torch.no_grad():
        model[0].weight.mul_(2)
    update(model, optimizer, seed=1)
    outcome = rank.snapshotter.settle(block=True)
    assert isinstance(outcome, Discarded)
    assert "model.0.weight changed" in outcome.reason
    expected = rank.live()
    rank.begin()
    with torch.no_grad():
        model[0].weight.mul_(2)
    update(model, optimizer, seed=2)
    assert isinstance(rank.snapshotter.settle(block=True), Snapshot), "that one is copied at once now"
    assert rank.holds(expected)


def test_without_overlap_the_copies_are_awaited(device):
    """Nothing guards them, so `begin` returns when they have arrived."""
    model, optimizer = make()
    update(model, optimizer)
    rank = Rank(copier=device, overlap=False, model=model, optimizer=optimizer)
    expected = rank.live()
    rank.begin()
    assert all(transfer.is_done for transfer in device.launched)
    update(model, optimizer, seed=1)
    assert isinstance(rank.snapshotter.settle(block=False), Snapshot)
    assert rank.holds(expected)


def test_the_arena_is_pinned_once_and_unpinned_before_it_goes(device):
    """Anew when it grows; the driver must not keep memory that is gone."""
    model, optimizer = make()
    rank = Rank(copier=device, model=model, optimizer=optimizer)
    rank.save()
    rank.save()
    assert device.pinned == [(rank.segment.address, rank.segment.arena_bytes)]
    model.more = torch.nn.Linear(300, 300)
    rank.save()
    assert device.pinned == [(rank.segment.address, rank.segment.arena_bytes)], "not the arena before"
    rank.close()
    assert device.pinned == []


def test_an_error_while_memory_is_made_ahead_costs_no_snapshot(device, monkeypatch, caplog):
    """The copy thread goes on: were it gone, the next update would wait for ever."""
    model, optimizer = make()
    rank = Rank(copier=device, model=model, optimizer=optimizer)
    failed, pin = threading.Event(), device.pin

    def fail_once(address, num_bytes):
        monkeypatch.setattr(device, "pin", pin)
        failed.set()
        raise RuntimeError("driver shutting down")

    monkeypatch.setattr(device, "pin", fail_once)
    update(model, optimizer)
    update(model, optimizer)
    assert failed.wait(60), "made at the second step"
    expected = rank.live()
    rank.save()
    assert rank.holds(expected)
    assert "driver shutting down" in caplog.text
    rank.close()


def test_ranks_are_compared_by_fingerprints(device):
    """Equal on equal state, another where one element differs; the device's part included."""
    digests = []
    for change in (0.0, 0.0, 1e-3):
        model, optimizer = make()
        update(model, optimizer)
        with torch.no_grad():
            model[0].weight[3, 1] += change
        rank = Rank(0, 2, copier=PlayedDevice(), model=model, optimizer=optimizer)
        rank.begin()
        digests.append(rank.snapshotter.settle(block=True).replica_digest)
    assert digests[0] == digests[1]
    assert digests[1] != digests[2]


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 30_000])
def test_a_fingerprint_sees_values_and_places(num_bytes):
    """A changed byte, two that have changed places, a byte that is missing."""
    data = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    whole = fingerprint(data)
    assert torch.equal(whole, fingerprint(data.clone()))
    for place in {0, num_bytes // 2, num_bytes - 1} if num_bytes else ():
        other = data.clone()
        other[place] += 1
        assert not torch.equal(whole, fingerprint(other))
    for first, second in ((0, num_bytes - 1), (1, 2), (5, 4096)):
        if max(first, second) < num_bytes and data[first] != data[second]:
            other = data.clone()
            other[first], other[second] = data[second], data[first]
            assert not torch.equal(whole, fingerprint(other))


@on_gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": True}])
def test_snapshots_of_gpu_training_are_what_was_there(options):
    """Launched ahead of the device, for many steps, each compared with a clone made at its boundary."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    rank = Rank(copier=CudaCopier(), model=model, optimizer=optimizer)
    for step in range(12):
        expected = rank.live() if step > 2 else None
        if expected:
            rank.snapshotter.begin(Plan(step, step))
        optimizer.zero_grad()
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        if expected:
            assert isinstance(rank.snapshotter.settle(block=True), Snapshot)
            saved = rank.saved()
            for name, tensor in expected.items():
                assert torch.equal(saved[name], tensor.cpu()), name
    rank.close()


@on_gpu
def test_gpu_state_comes_back():
    """Into GPU tensors, and training goes on alike."""
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = torch.nn.Linear(64, 64).cuda()
        states.append((model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    model, optimizer = states[0]
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    shard = Rank(copier=CudaCopier(), model=model, optimizer=optimizer).save()
    fresh, fresh_optimizer = states[1]
    Rank(copier=CudaCopier(), model=fresh, optimizer=fresh_optimizer).restore([shard])
    assert torch.equal(fresh.weight, model.weight)
    moments = [o.state[m.weight]["exp_avg"] for m, o in states]
    assert torch.equal(*moments)
    assert moments[1].is_cuda
