"""What a killed worker leaves in its node's memory is what the next one restores from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raycheck.core.page import PAGE_BYTES
from tests.runtime.harness import LocalCluster, wait_until
from tests.runtime.jobs import train

WIDTH = 20_000
"""A shard of several chunks."""


@pytest.fixture
def cluster(tmp_path):
    clusters = []

    def make(**settings):
        clusters.append(LocalCluster(f"{tmp_path}/run", interval_steps=1000, **settings))
        return clusters[-1]

    yield make
    for each in clusters:
        each.close()


def straight(cluster, tmp_path, world_size):
    """The same training without interruption: what each rank ends with."""
    reference = LocalCluster(f"{tmp_path}/reference", interval_steps=1000)
    try:
        return reference.start(train, {"steps": 12, "width": WIDTH}, world_size=world_size).results()
    finally:
        reference.close()


def stand_after_a_commit(cluster, tmp_path, world_size):
    """Train until step 5 is committed and all ranks stand before step 8's update; nothing is in flight."""
    pause_file = str(tmp_path / "go-on")
    config = {"steps": 12, "width": WIDTH, "save_at": [5], "pause_at": 7, "pause_file": pause_file}
    generation = cluster.start(train, config, world_size=world_size)
    for rank in range(world_size):
        wait_until(lambda rank=rank: os.path.exists(f"{pause_file}.reached{rank}"), f"rank {rank} at step 7")
    assert cluster.committed_steps() == [5]
    return generation


def segments(cluster, node="node0"):
    """The segments that an agent holds, as the kernel shows them: inode and path."""
    found = {}
    for fd in Path(f"/proc/{cluster.agents[node].pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith("/memfd:raycheck"):
                found[os.stat(fd).st_ino] = fd
        except OSError:
            continue
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_restarted_worker_restores_from_memory(cluster, tmp_path, world_size):
    """Not a byte of a shard comes from storage; and what it trains on is what the straight run has."""
    cluster_ = cluster()
    expected = straight(cluster_, tmp_path, world_size)
    generation = stand_after_a_commit(cluster_, tmp_path, world_size)
    before = set(segments(cluster_))
    assert len(before) == world_size
    generation.kill_all()
    results = cluster_.start(train, {"steps": 12, "width": WIDTH}, world_size=world_size).results()
    for rank, result in enumerate(results):
        assert (result["restored"], result["source"], result["num_bytes"]) == (5, "memory", 0)
        assert result["digest"] == expected[rank]["digest"]
        assert result["losses"] == expected[rank]["losses"][5:]


def test_the_memory_itself_is_taken_over(cluster, tmp_path):
    """The new worker's segment is the old one: a node never holds two for a rank."""
    cluster_ = cluster()
    generation = stand_after_a_commit(cluster_, tmp_path, 1)
    before = set(segments(cluster_))
    generation.kill(0)
    pause_file = str(tmp_path / "again")
    cluster_.start(train, {"steps": 12, "width": WIDTH, "pause_at": 8, "pause_file": pause_file})
    wait_until(lambda: os.path.exists(f"{pause_file}.reached0"), "the new worker")
    assert set(segments(cluster_)) == before


@pytest.mark.parametrize("part", ["a byte", "all"])
def test_memory_that_has_changed_since_is_read_from_storage(cluster, tmp_path, part):
    """As when its worker died while the next snapshot was being copied into it. Checksums tell."""
    cluster_ = cluster()
    expected = straight(cluster_, tmp_path, 1)
    stand_after_a_commit(cluster_, tmp_path, 1).kill_all()
    (path,) = segments(cluster_).values()
    fd = os.open(path, os.O_RDWR)
    size = os.fstat(fd).st_size - PAGE_BYTES
    begin, end = (size // 2, size // 2 + 1) if part == "a byte" else (0, size)
    damage = bytes(byte ^ 255 for byte in os.pread(fd, end - begin, PAGE_BYTES + begin))
    assert os.pwrite(fd, damage, PAGE_BYTES + begin) == end - begin
    os.close(fd)
    (result,) = cluster_.start(train, {"steps": 12, "width": WIDTH}).results()
    assert result["restored"] == 5
    assert result["source"] == ("both" if part == "a byte" else "storage")
    assert result["num_bytes"] > 0
    assert result["digest"] == expected[0]["digest"]


def test_without_the_agent_that_held_it_storage_is_read(cluster, tmp_path):
    """Memory goes with its last holder."""
    cluster_ = cluster()
    stand_after_a_commit(cluster_, tmp_path, 1).kill_all()
    cluster_.kill_agent("node0")
    cluster_.start_agent("node0")
    (result,) = cluster_.start(train, {"steps": 12, "width": WIDTH}).results()
    assert (result["restored"], result["source"]) == (5, "storage")


def test_another_world_size_takes_memory_and_reads_storage(cluster, tmp_path):
    """One of two segments is gone on with, and the other given up once all ranks load."""
    cluster_ = cluster()
    generation = stand_after_a_commit(cluster_, tmp_path, 2)
    before = set(segments(cluster_))
    assert len(before) == 2
    generation.kill_all()
    pause_file = str(tmp_path / "again")
    cluster_.start(train, {"steps": 12, "width": WIDTH, "pause_at": 8, "pause_file": pause_file})
    wait_until(lambda: os.path.exists(f"{pause_file}.reached0"), "the new worker")
    assert len(segments(cluster_)) == 1
    assert set(segments(cluster_)) < before
    Path(pause_file).touch()
    (result,) = cluster_.generations[-1].results()
    assert (result["restored"], result["source"]) == (5, "storage")


def test_a_run_that_has_ended_leaves_no_memory(cluster):
    """Nobody comes after workers that have closed: no descriptor is held, nor the mapping of what was stored."""
    cluster_ = cluster()
    cluster_.start(train, {"steps": 12, "width": WIDTH, "save_at": [5]}, world_size=2).results()
    assert 5 in cluster_.committed_steps()
    wait_until(lambda: not segments(cluster_), "the agent to let go")
    assert segments(cluster_) == {}
