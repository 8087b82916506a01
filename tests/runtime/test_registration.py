"""Checkpoints handed over to Ray Train, with a real coordinator and a Ray Train that the test plays."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.registration import along_the_way, at_the_end, chosen_every_s
from raycheck.core.retention import to_delete
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster, wait_until


@pytest.fixture
def cluster(tmp_path):
    made = LocalCluster(str(tmp_path / "run"), interval_steps=10**6, keep_last=1)
    yield made
    made.close()


def train(cluster, *, steps, save_at):
    return cluster.start(jobs.train, {"steps": steps, "save_at": save_at, "step_s": 0}).results()


def offer(cluster, held, every_s=1e-3):
    return wait_until(lambda: cluster.coordinator.hear_registered(held, every_s), "an offer")


def names_on_disk(cluster):
    return sorted(path.parent.name for path in Path(cluster.url).glob("checkpoints/*/manifest.json"))


def records(cluster):
    return sorted(path.stem for path in Path(cluster.url).glob("registered/*.json"))


def test_the_one_behind_the_newest_is_offered_and_is_safe_from_rotation(cluster):
    """keep_last counts the rest; the record and a copy of the layout are there before the offer is."""
    cluster.coordinator.hear_registered([], 1e-3)
    train(cluster, steps=30, save_at=[10, 20])
    first = offer(cluster, [])
    assert first.name.startswith("step-0000000010-")
    assert first.metrics.keys() == {"loss"}
    folder = Path(cluster.url, "checkpoints", first.name)
    layout = json.loads((folder / "manifest.json").read_text())["layout"]
    assert pq.read_table(folder / "layout.parquet").equals(
        pq.read_table(Path(cluster.url, "layouts", f"{layout}.parquet"))
    )
    assert records(cluster) == [first.name]
    last = cluster.coordinator.offer_last([first.name])
    assert last.name.startswith("step-0000000030-")
    cluster.coordinator._deletion.submit(int).result(30)
    assert [name[5:15] for name in names_on_disk(cluster)] == ["0000000010", "0000000020", "0000000030"]


def test_a_lost_coordinator_does_not_delete_what_ray_may_hold(cluster):
    """Between the offer and the next word of the controller only the record knows."""
    cluster.coordinator.hear_registered([], 1e-3)
    train(cluster, steps=20, save_at=[10])
    first = offer(cluster, [])
    cluster.replace_coordinator()
    train(cluster, steps=60, save_at=[40, 50])
    assert cluster.coordinator.hear_registered([first.name], None) is None
    assert first.name in names_on_disk(cluster)
    assert records(cluster) == [first.name]


def test_what_ray_does_not_hold_is_ours_again(cluster):
    """An offer that never reached Ray: its record goes, and rotation takes the checkpoint."""
    cluster.coordinator.hear_registered([], 1e-3)
    train(cluster, steps=20, save_at=[10])
    first = offer(cluster, [])
    cluster.replace_coordinator()
    cluster.coordinator.hear_registered([], None)
    generation = cluster.start(jobs.train, {"steps": 60, "save_at": [40], "step_s": 0})
    cluster.coordinator.hear_registered([], None)
    generation.results()
    wait_until(lambda: first.name not in names_on_disk(cluster), "its rotation")
    assert [name[5:15] for name in names_on_disk(cluster)] == ["0000000040", "0000000060"]
    assert records(cluster) == []


def test_what_ray_deletes_is_gone_and_the_newest_is_restored(cluster):
    """Its folder vanishes as a whole or in part; neither hides the newer one."""
    cluster.coordinator.hear_registered([], 1e-3)
    train(cluster, steps=20, save_at=[5, 10])
    first = offer(cluster, [])
    second = offer(cluster, [first.name])
    assert cluster.coordinator.hear_registered([first.name, second.name], None) is None
    shutil.rmtree(Path(cluster.url, "checkpoints", first.name))
    for shard in Path(cluster.url, "checkpoints", second.name).glob("*.safetensors"):
        shard.unlink()
    cluster.coordinator.hear_registered([], None)
    wait_until(lambda: records(cluster) == [], "both taken back")
    (result,) = train(cluster, steps=30, save_at=[])
    assert result["restored"] == 20


def test_the_newest_deleted_under_a_running_job_is_made_up_for(cluster, tmp_path):
    """A user's own report can push even the last one out of Ray's list: another checkpoint is due at once."""
    train(cluster, steps=20, save_at=[])
    last = cluster.coordinator.offer_last([])
    stop = tmp_path / "stop"
    config = {"steps": 10**6, "step_s": 0.005, "stop_file": str(stop)}
    generation = cluster.start(jobs.train, config)
    assert cluster.coordinator.hear_registered([last.name], None) is None
    wait_until(lambda: (cluster.status()["restored_step"] or 0) == 20, "the restore")
    shutil.rmtree(Path(cluster.url, "checkpoints", last.name))
    cluster.coordinator.hear_registered([], None)
    wait_until(lambda: cluster.committed_steps()[-1:] > [20], "another checkpoint")
    stop.touch()
    generation.results()


# Deciding.

REFS = st.lists(
    st.integers(1, 60).map(lambda step: CheckpointRef(step, GenerationId(1, "ab"), step)),
    unique=True,
    max_size=12,
).map(sorted)


@given(REFS, st.data())
def test_a_newer_one_always_stays_behind_what_is_registered(committed, data):
    """Along the way Ray never gets the newest, and rotation keeps one that Ray does not know."""
    registered = set(data.draw(st.lists(st.sampled_from(committed), max_size=6)) if committed else [])
    registered -= set(committed[-1:])
    times = {ref: float(ref.step) for ref in committed}
    last = data.draw(st.none() | st.floats(0, 60))
    every_s = data.draw(st.floats(0.1, 30))
    ref = along_the_way(committed, registered, created_unix_s=times, last_unix_s=last, every_s=every_s)
    if ref is not None:
        assert ref not in registered
        assert ref < committed[-1]
        assert last is None or not 0 <= times[ref] - last < every_s
        registered.add(ref)
    rest = [kept for kept in committed if kept not in registered]
    gone = to_delete(rest, keep_last=1)
    assert not committed or committed[-1] not in {*gone, *registered}


@given(REFS)
def test_the_end_registers_the_newest_once(committed):
    ref = at_the_end(committed, set())
    assert ref == (committed[-1] if committed else None)
    assert at_the_end(committed, {ref}) is None


def test_how_often_follows_what_ray_keeps():
    assert chosen_every_s(None, num_to_keep=None) is None
    assert chosen_every_s(None, num_to_keep=3) == 600
    assert chosen_every_s(60, num_to_keep=None) == 60
