"""What a restore can do besides going on: other shardings, parts, milestones. Real processes."""

import pytest

from tests.runtime import jobs
from tests.runtime.harness import LocalCluster


@pytest.fixture
def make_cluster(tmp_path):
    clusters = []

    def make(**settings):
        clusters.append(LocalCluster(str(tmp_path / "run"), **{"interval_steps": 1_000_000, **settings}))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def test_plain_to_sharded_and_back_reads_each_byte_about_once(make_cluster):
    """Plain on 2 ranks, FSDP2 on 2, FSDP2 on 3, plain on 1: through agents and storage (K1)."""
    cluster = make_cluster()
    job = {"steps": 4, "width": 300_000}
    results = cluster.start(jobs.train_sharded, {**job, "is_sharded": False}, world_size=2).results()
    for is_sharded, world_size in ((True, 2), (True, 3), (False, 1)):
        before = results[0]["at_end"]
        job["steps"] += 2
        config = {**job, "is_sharded": is_sharded}
        results = cluster.start(jobs.train_sharded, config, world_size=world_size).results()
        assert [result["restored"] for result in results] == [job["steps"] - 2] * world_size
        assert {result["at_restore"] for result in results} == {before}
        read_bytes = sum(result["num_bytes"] for result in results)
        # Whole checksummed chunks of 1 MiB are fetched; with pieces of a few MB that is felt.
        assert read_bytes < 1.7 * results[0]["state_bytes"]


def test_only_some_of_the_state_is_asked_for(make_cluster):
    """attach(strict=False) and rename reach a real run; without them it is refused before the first step."""
    cluster = make_cluster()
    job = {"steps": 3, "width": 32, "is_sharded": False}
    end = cluster.start(jobs.train_sharded, job).results()[0]["at_end"]
    renamed = {**job, "attach": {"rename": {"optimizer": "adam"}}}
    refused = cluster.start(jobs.train_sharded, renamed).outcomes()[0]
    assert "CheckpointMismatchError" in refused["error"]
    assert "adam is in the checkpoint and not in attach()" in refused["error"]
    in_part = {**job, "steps": 4, "attach": {"rename": {"optimizer": "adam"}, "strict": False}}
    result = cluster.start(jobs.train_sharded, in_part).results()[0]
    assert result["restored"] == 3
    assert result["at_end"] != end, "the optimizer started anew"


def test_milestones_stay(make_cluster):
    """keep_every_steps outlives keep_last, across starts."""
    cluster = make_cluster(interval_steps=1, keep_last=1, keep_every_steps=10)
    job = {"step_s": 0, "width": 8}
    cluster.start(jobs.train, {**job, "steps": 25, "save_at": [9, 10, 12, 15, 20, 23]}).results()
    cluster.start(jobs.train, {**job, "steps": 33, "save_at": [26, 30, 32]}).results()
    cluster.coordinator._deletion.submit(int).result(30)
    kept = cluster.committed_steps()
    assert kept[-1] == 33
    assert {step // 10 for step in kept} == {1, 2, 3}
    assert [step // 10 for step in kept[:-1]] in ([1, 2], [1, 2, 3]), "one of each ten"
