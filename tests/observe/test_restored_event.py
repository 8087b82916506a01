"""A run's telemetry says how each restore went."""

import pytest

from raycheck.core.telemetry import events_of
from raycheck.observe.events import read_events
from raycheck.observe.report.texts import event_text
from raycheck.runtime.messages import RestoreEnded
from raycheck.runtime.reporting import _restore_facts
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster, wait_until


def restores(cluster):
    events = events_of(read_events(cluster.run_store.store))
    return [event for event in events if event.kind == "restored"]


@pytest.fixture
def make_cluster(tmp_path):
    clusters = []

    def make():
        clusters.append(LocalCluster(str(tmp_path / "run" / "raycheck"), interval_steps=1_000_000))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def test_it_says_from_where_how_long_and_how_much(make_cluster, tmp_path):
    """A fresh start, a killed group on nodes that are still there, and another job: nothing, memory, storage."""
    cluster = make_cluster()
    paused = {"steps": 9, "pause_at": 7, "pause_file": str(tmp_path / "go"), "save_at": [5]}
    first = cluster.start(jobs.train, paused, world_size=2)
    wait_until(lambda: all((tmp_path / f"go.reached{rank}").exists() for rank in range(2)), "step 7")
    first.kill_all()
    second = cluster.start(jobs.train, {"steps": 7}, world_size=2).results()
    assert [result["source"] for result in second] == ["memory", "memory"]
    third_cluster = make_cluster()
    third = third_cluster.start(jobs.train, {"steps": 8}, world_size=2).results()
    wait_until(lambda: len(restores(cluster)) == 3, "the third restore in the telemetry")
    fresh, memory, storage = restores(cluster)
    assert fresh.count("step") == 0
    assert "source" not in fresh.facts
    assert memory.text("source") == "memory"
    assert memory.count("num_bytes") == memory.count("num_memory_bytes") > 0
    assert (storage.text("source"), storage.count("num_memory_bytes")) == ("storage", 0)
    assert storage.count("num_bytes") == sum(result["num_bytes"] for result in third)
    assert 0 < storage.number("seconds") < 60
    assert "out of storage, in " in event_text(storage)


@pytest.mark.parametrize(
    ("loads", "source", "seconds", "num_bytes"),
    [
        ([(1.0, 5, 0), (2.0, 7, 0)], "storage", 2.0, 12),
        ([(3.0, 0, 5), (2.0, 0, 7)], "memory", 3.0, 12),
        ([(1.0, 5, 0), (2.0, 0, 7)], "both", 2.0, 12),
        ([(1.0, 0, 5), (None, 0, 0)], "memory", 1.0, 5),
        ([(None, 0, 0)], "storage", None, 0),
    ],
)
def test_ranks_are_taken_together(loads, source, seconds, num_bytes):
    """The slowest rank's time, all ranks' bytes; a rank whose agent has restarted tells nothing."""
    facts = _restore_facts(RestoreEnded(rank, *load) for rank, load in enumerate(loads))
    assert (facts["source"], facts["seconds"], facts["num_bytes"]) == (source, seconds, num_bytes)
