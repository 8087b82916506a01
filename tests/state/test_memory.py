"""Memory: a budget that refuses, arenas that do not grow, nothing left behind."""

import gc
import os
import pickle
import re
import weakref
from pathlib import Path

import pytest
import torch

from raycheck.errors import StateError
from raycheck.state.memory import NodeMemory, read_node_memory, snapshot_budget_bytes
from raycheck.state.snapshot import Discarded, Snapshot
from tests.state.rank import Gate, Rank, make_model, train

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_root(root: Path, available_kib: int, cgroup: str, files: dict[str, str]) -> Path:
    write(root, {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n"})
    write(
        root, {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    )
    return root


def test_without_a_limit_it_is_what_the_machine_has(tmp_path):
    """Neither "max" nor the largest number is a limit."""
    root = make_root(
        tmp_path,
        1 << 20,
        "4:memory:/job\n1:cpu:/job\n0::/pod\n",
        {
            "pod/memory.max": "max\n",
            "pod/memory.current": "5",
            "memory/job/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/job/memory.usage_in_bytes": "5",
        },
    )
    assert read_node_memory(root) == NodeMemory(GIB, None)
    assert read_node_memory(root).free_bytes == GIB


def test_the_tightest_limit_above_counts(tmp_path):
    """Version 2: groups inside each other; droppable file cache is not taken memory."""
    root = make_root(
        tmp_path,
        100 << 20,
        "0::/pod/container\n",
        {
            "pod/container/memory.max": str(8 * GIB),
            "pod/container/memory.current": str(2 * GIB),
            "pod/memory.max": str(6 * GIB),
            "pod/memory.current": str(5 * GIB),
            "pod/memory.stat": f"anon 1\ninactive_file {3 * GIB}\n",
        },
    )
    assert read_node_memory(root) == NodeMemory(100 * GIB, 4 * GIB)


def test_a_limit_of_version_1_counts(tmp_path):
    """Its files have other names, and a container sees its own group as the root."""
    root = make_root(
        tmp_path,
        100 << 20,
        "9:memory:/docker/abc\n",
        {
            "memory/memory.limit_in_bytes": str(4 * GIB),
            "memory/memory.usage_in_bytes": str(3 * GIB),
            "memory/memory.stat": f"total_inactive_file {GIB}\n",
        },
    )
    assert read_node_memory(root).limit_left_bytes == 2 * GIB


def test_a_limit_that_is_exceeded_leaves_nothing(tmp_path):
    """Never less than nothing."""
    files = {"memory.max": "10", "memory.current": "20"}
    assert read_node_memory(make_root(tmp_path, 1, "0::/\n", files)).free_bytes == 0


def test_this_machine_can_be_read():
    """The real files parse."""
    assert read_node_memory().free_bytes > 0


def test_the_budget_is_shared_by_the_ranks_of_a_node():
    """G5: four ranks get a quarter each, of what is not reserved."""
    memory = NodeMemory(100 * GIB, 40 * GIB)
    assert snapshot_budget_bytes(memory, num_ranks=4, reserved_fraction=0.5) == 5 * GIB
    assert snapshot_budget_bytes(memory, num_ranks=1, reserved_fraction=0.0, held_bytes=GIB) == 41 * GIB
    for bad in (
        {"num_ranks": 0},
        {"num_ranks": 1, "reserved_fraction": 1.0},
        {"num_ranks": 1, "held_bytes": -1},
    ):
        with pytest.raises(ValueError, match="="):
            snapshot_budget_bytes(memory, **bad)


def test_what_exceeds_the_budget_is_refused_with_the_numbers():
    """G5: at the check before the first step, and when the state grows later."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(StateError) as error:
        Rank(model=model, budget_bytes=10_000).snapshotter.check()
    assert error.value.allowed_bytes == 10_000
    assert error.value.needed_bytes > 16 << 10
    assert str(error.value.needed_bytes) in str(error.value)
    assert pickle.loads(pickle.dumps(error.value)).needed_bytes == error.value.needed_bytes

    big = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(big.parameters())
    rank = Rank(model=big, optimizer=optimizer, budget_bytes=500_000)
    rank.snapshotter.check()
    rank.save()
    big(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    with pytest.raises(StateError, match="shared memory"):
        rank.begin()
    assert not rank.snapshotter.is_pending
    optimizer.state.clear()
    assert rank.save(), "what fits is saved again"
    rank.close()


def resident_kib() -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_memory_is_flat_over_many_snapshots():
    """G1: neither good nor discarded snapshots leave anything behind."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rank = Rank(model=model, optimizer=optimizer)
    sizes, resident = set(), []
    for number in range(300):
        gate = Gate(rank) if number % 3 == 0 else None
        rank.begin()
        if gate:
            optimizer.state[model[0].weight]["exp_avg"].add_(1)
            gate.open()
        outcome = rank.snapshotter.settle(block=True)
        assert isinstance(outcome, Discarded if gate else Snapshot)
        rank.snapshotter._eager_names.clear()
        rank.snapshotter._overlap = True
        if number >= 20:
            sizes.add(os.fstat(rank.segment.fd).st_size)
            resident.append(resident_kib())
    assert len(sizes) == 1
    assert max(resident) < 1.05 * resident[0]
    rank.close()


def test_a_replaced_tensor_is_freed_once_its_copy_has_ended():
    """The snapshot keeps old memory only for as long as it copies it."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    rank = Rank(model=model, optimizer=optimizer)
    train(model, optimizer)
    gate = Gate(rank)
    rank.begin()
    old = weakref.ref(model[0].weight)
    optimizer.state.pop(model[0].weight)
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(16, 8))
    model[0].weight = optimizer.param_groups[0]["params"][0]
    gate.open()
    rank.snapshotter.settle(block=True)
    gc.collect()
    assert old() is None
    rank.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:raycheck" in line]


def test_nothing_is_left_after_close():
    """G2: 20 times with changing sizes, one in the middle of a copy; no descriptor, mapping or hook."""
    gc.collect()
    before, before_maps = open_descriptors(), len(mappings())
    for number in range(20):
        model = torch.nn.Linear(10 + 37 * number, 100)
        optimizer = torch.optim.AdamW(model.parameters())
        rank = Rank(model=model, optimizer=optimizer)
        if number % 2:
            rank.begin()
        else:
            rank.save()
        rank.close()
        rank.close()
        assert not optimizer._optimizer_step_pre_hooks
        del rank
    gc.collect()
    assert open_descriptors() == before
    assert len(mappings()) == before_maps


def test_the_arena_is_there_before_the_first_snapshot():
    """Made and touched in the background at the optimizer's second step: the first stall is like any other."""
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    rank = Rank(model=model, optimizer=optimizer)
    for expected_layouts in (0, 1, 1):
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        assert len(rank.images) == expected_layouts
    assert rank.segment.arena_bytes > 3 * 4_000_000
    boundary = rank.live()
    rank.save()
    assert rank.holds(boundary)
    assert len(rank.images) == 1
    rank.close()
