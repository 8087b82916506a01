"""Sharded state on real processes joined by gloo: FSDP2, HSDP, tensor parallel, ZeRO."""

import pytest
import torch

from tests.state.sharded_jobs import on_ranks, overlapped_steps, refused, restore, save

STEPS = 3


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


def merged(states):
    """Return the state of all ranks together: of ZeRO's, each has its own."""
    found = {}
    for state in states:
        found |= state
    return found


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Return a function that saves once per kind."""
    known = {}

    def of(kind, num_ranks):
        if (kind, num_ranks) not in known:
            folder = tmp_path_factory.mktemp("saved")
            known[kind, num_ranks] = on_ranks(save, num_ranks, folder, kind, STEPS)
        return known[kind, num_ranks]

    return of


PAIRS = [
    (("single", 1), ("fsdp", 2)),
    (("ddp", 2), ("fsdp", 4)),
    (("fsdp", 4), ("single", 1)),
    (("fsdp", 4), ("ddp", 2)),
    (("fsdp", 4), ("fsdp", 4)),
    (("fsdp", 4), ("fsdp", 2)),
    (("fsdp", 2), ("hsdp", 4)),
    (("hsdp", 4), ("fsdp_tp", 4)),
    (("fsdp_tp", 4), ("tp", 2)),
    (("tp", 2), ("single", 1)),
    (("zero", 2), ("zero", 4)),
    (("zero", 4), ("fsdp", 2)),
    (("ddp", 2), ("zero", 2)),
]


@pytest.mark.parametrize(("saved", "restored"), PAIRS, ids=lambda pair: f"{pair[0]}{pair[1]}")
def test_any_sharding_restores_any_other(tmp_path, saves, saved, restored):
    """Bit for bit, and the next steps are the same (K1, and E for sharded state)."""
    results = saves(*saved)
    shards = [shard for shard, _, _ in results]
    expected, later = merged(r[1] for r in results), merged(r[2] for r in results)
    kind, num_ranks = restored
    outcomes = on_ranks(restore, num_ranks, tmp_path, kind, STEPS, shards)
    found, found_later = merged(o[0] for o in outcomes), merged(o[1] for o in outcomes)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for name, tensor in later.items():
        torch.testing.assert_close(found_later[name], tensor, rtol=1e-4, atol=1e-5)
    if kind not in ("hsdp", "fsdp_tp"):
        # Each byte is read about once per job; the values of each rank come on top. Of a
        # tensor that some ranks hold alike and others do not, each holder reads its own.
        assert sum(o[2] for o in outcomes) <= 1.01 * bytes_of(expected) + 64_000 * num_ranks


@pytest.mark.parametrize(("kind", "num_ranks"), [("fsdp", 4), ("hsdp", 4), ("fsdp_tp", 4), ("zero", 4)])
def test_sharded_bytes_are_written_once_and_evenly(saves, kind, num_ranks):
    """Replicas share the writing; each rank writes about its part."""
    results = saves(kind, num_ranks)
    sizes = [len(data) for (data, _), _, _ in results]
    total = bytes_of(merged(r[1] for r in results))
    assert sum(sizes) <= 1.02 * total + 64_000 * num_ranks
    if kind != "zero":
        assert max(sizes) <= 1.3 * total / num_ranks


def test_snapshots_overlap_with_sharded_training(tmp_path):
    """Every snapshot is whole, and holds the shards as they were at its boundary (F6)."""
    for held in on_ranks(overlapped_steps, 2, tmp_path, "fsdp"):
        assert held == ["Snapshot", True] * 6


def test_gathered_parameters_are_sharded_again_before_they_are_saved(tmp_path, saves):
    """After a forward without a backward FSDP2 leaves whole parameters in the module."""
    shards = [r[0] for r in on_ranks(save, 2, tmp_path, "fsdp", STEPS, True)]
    names = [{(e.name, e.offset, e.shape) for e in entries} for _, entries in shards]
    plain = [{(e.name, e.offset, e.shape) for e in entries} for (_, entries), _, _ in saves("fsdp", 2)]
    assert names == plain


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    """Partial values, and a mesh of some of the ranks."""
    for texts in on_ranks(refused, 4, tmp_path):
        assert len(texts) == 2
        assert "tensor is a DTensor on 2 of 4 ranks" in texts[0]
        assert "tensor is a DTensor with partial values" in texts[1]
