"""Field cases of the records of a run, each on the lowest level that proves it."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import uuid
from pathlib import Path

import fsspec
import pytest

from raycheck.config import Settings
from raycheck.core import layout
from raycheck.core.retention import to_delete
from raycheck.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from raycheck.observe.events import EventLog
from raycheck.runtime.coordinator import Coordinator
from raycheck.runtime.keeping import Keeping
from raycheck.store.objects import Store
from raycheck.store.run import RunStore
from tests.reliability.records import begin, commit, selectable, stage
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster, wait_until

HOUR_S = 3600.0


@pytest.fixture
def run(tmp_path):
    return RunStore(Store(str(tmp_path / "run")))


@pytest.fixture
def check():
    """Check a run as its first start does."""
    coordinators = []

    def check(run, **settings):
        coordinators.append(
            Coordinator(
                run_store=run, settings=Settings(telemetry=False, **settings), send=lambda node, order: None
            )
        )
        coordinators[-1].check()

    yield check
    for coordinator in coordinators:
        coordinator.close()


class TestA2Copies:
    def test_a_whole_copy_is_restorable(self, run, tmp_path, check):
        """All folders copied to another place: the same steps are there."""
        commit(run, begin(run), 10)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        copy = RunStore(Store(str(tmp_path / "copy")))
        check(copy)
        assert selectable(copy) == [10]

    def test_a_copy_without_its_records_is_refused_with_what_to_do(self, run, tmp_path, check):
        """Checkpoints alone do not say which count: no silent start at step 0."""
        commit(run, begin(run), 10)
        shutil.copytree(tmp_path / "run/checkpoints", tmp_path / "copy/checkpoints")
        copy = RunStore(Store(str(tmp_path / "copy")))
        with pytest.raises(CheckpointError, match=r'generations/.*resume="fresh"'):
            check(copy)
        check(copy, resume="fresh")

    def test_a_copy_without_its_manifest_is_left_alone(self, run, tmp_path):
        """Not selected, and not swept: this run never wrote it."""
        stage(run, begin(run), 10)
        shutil.copytree(tmp_path / "run/checkpoints", tmp_path / "copy/checkpoints")
        copy = RunStore(Store(str(tmp_path / "copy")))
        begin(copy)
        mine = begin(copy)
        assert selectable(copy) == []
        assert copy.sweep(mine, older_than_s=HOUR_S, now_unix_s=1e9) == []
        assert len(copy.attempts()) == 1


def test_a6_a_step_whose_save_was_interrupted_is_saved_again(run):
    """Keys are unique to their attempt: residue neither collides nor counts."""
    first = begin(run)
    parent = commit(run, first, 20)
    stage(run, first, 40)
    second = begin(run, parent)
    commit(run, second, 40)
    commit(run, second, 40, plan_id=2)
    assert selectable(run) == [40, 40, 20]


class TestB2NothingStartsAtZeroByItself:
    def test_a_lineage_whose_checkpoints_are_gone_is_an_error(self, run, check):
        """Deleted by hand: the run says so, and starts at 0 only when told to."""
        parent = commit(run, begin(run), 10)
        begin(run, parent)
        run.delete(parent)
        with pytest.raises(CheckpointError, match=r"restored step 10.*fresh"):
            check(run)
        check(run, resume="fresh")

    def test_a_fresh_start_that_has_committed_nothing_goes_on_fresh(self, run, check):
        """Older checkpoints were left behind on purpose."""
        commit(run, begin(run), 10)
        begin(run, None)
        check(run)
        assert selectable(run) == []

    def test_an_empty_root_is_a_new_run(self, run, check):
        """Nothing there, nothing lost."""
        check(run)


def test_b3_a_step_that_is_not_there_stops_the_run_before_it_starts(run, check):
    """The available ones are listed."""
    generation = begin(run)
    commit(run, generation, 10)
    commit(run, generation, 20)
    with pytest.raises(CheckpointNotFoundError, match="available steps: 10, 20"):
        check(run, resume=77)


def test_c1_file_times_order_nothing(run, tmp_path):
    """Times that are equal or run backwards change neither what is newest nor what is rotated."""
    generation = begin(run)
    refs = [commit(run, generation, step) for step in (1, 2, 3, 4, 5, 6)]
    for age, ref in enumerate(refs):
        for path in Path(tmp_path / "run" / layout.checkpoint_prefix(ref)).iterdir():
            os.utime(path, (1e9 - age, 1e9 - age))
    assert selectable(run) == [6, 5, 4, 3, 2, 1]
    assert to_delete(run.attempts(), keep_last=3) == refs[:3]


def test_c3_a_fresh_run_in_a_used_root_rotates_its_own_alone(tmp_path):
    """Leftovers with higher steps neither push the new ones out nor are touched."""
    url = str(tmp_path / "run")
    run = RunStore(Store(url))
    first = begin(run)
    for step in (500, 600, 700):
        commit(run, first, step)
    cluster = LocalCluster(url, interval_steps=1_000_000, keep_last=2, resume="fresh", telemetry=False)
    try:
        cluster.start(jobs.train, {"steps": 30, "save_at": [10, 20]}, world_size=1).results()
        wait_until(lambda: cluster.committed_steps() == [20, 30, 500, 600, 700], "the rotation of step 10")
    finally:
        cluster.close()
    assert selectable(run) == [30, 20]


def test_o4_placeholders_are_no_checkpoints():
    """Zero-byte folders made by hand are neither attempts nor records."""
    root = f"memory://test-{uuid.uuid4().hex}/run"
    run = RunStore(Store(root))
    generation = begin(run)
    kept, gone = commit(run, generation, 10), commit(run, generation, 20)
    run.delete(gone)
    file_system = fsspec.filesystem("memory")
    for name in (layout.checkpoint_prefix(gone), "generations", "checkpoints/step_10"):
        file_system.makedirs(f"{file_system._strip_protocol(root)}/{name}", exist_ok=True)
    assert run.attempts() == [kept]
    assert selectable(run) == [10]


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_p1_nothing_is_unpickled(run, tmp_path):
    """Records, manifest, layout and sums replaced by a pickle: refused, and nothing was executed."""
    ref = commit(run, begin(run), 10)
    manifest = run.read_manifest(ref)
    bomb = pickle.dumps(_Bomb(tmp_path / "executed"))
    run.store.put(layout.layout_key(manifest.layout_digest), bomb)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        run.read_layout(manifest)
    shard = manifest.shards[0].name
    run.store.put(f"{layout.checkpoint_prefix(ref)}/{layout.sums_name(shard)}", bomb)
    with pytest.raises((CorruptCheckpointError, ValueError)):
        run.read_sums(manifest, 0)
    run.store.put(layout.manifest_key(ref), bomb)
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        run.read_manifest(ref)
    run.store.put(layout.record_key(ref.generation), bomb)
    assert run.records() == []
    run.store.put(layout.claim_key(ref.generation), bomb)
    assert run.claim_facts(ref.generation) == {}
    assert not (tmp_path / "executed").exists()


class TestSweep:
    """What killed writers left goes after the grace time, and nothing else."""

    def test_what_was_cut_off_long_ago_goes(self, run):
        """Attempts without a manifest, of generations that a claim older than the grace time cut off."""
        first = begin(run, claimed_unix_s=0.0)
        kept, left = commit(run, first, 10), stage(run, first, 20)
        second = begin(run, kept, claimed_unix_s=1000.0)
        newer = stage(run, second, 30)
        third = begin(run, kept, claimed_unix_s=5000.0)
        own = stage(run, third, 40)
        swept = run.sweep(third, older_than_s=HOUR_S, now_unix_s=5000.0)
        assert [layout.checkpoint_prefix(left) in key for key in swept] == [True]
        assert run.attempts() == [kept, newer, own]
        assert selectable(run) == [10]

    def test_within_the_grace_time_nothing_goes(self, run):
        """An old writer may still be at it."""
        stage(run, begin(run, claimed_unix_s=0.0), 20)
        assert (
            run.sweep(begin(run, claimed_unix_s=1000.0), older_than_s=HOUR_S, now_unix_s=1000.0 + 3599) == []
        )

    def test_a_newer_start_is_none_of_its_business(self, run):
        """One that was overtaken sweeps what it could, not what came after it."""
        stage(run, begin(run), 20)
        mine = begin(run)
        stage(run, mine, 30)
        newest = begin(run)
        live = stage(run, newest, 40)
        run.sweep(mine, older_than_s=HOUR_S, now_unix_s=1e9)
        assert [ref.step for ref in run.attempts()] == [30, 40]
        assert live in run.attempts()

    def test_neighbours_are_left_alone(self, tmp_path):
        """run1 is not run10, and a root may lie within another."""
        runs = [RunStore(Store(str(tmp_path / name))) for name in ("run1", "run10", "run1/inner")]
        for each in runs:
            stage(each, begin(each), 20)
        assert len(runs[0].sweep(begin(runs[0]), older_than_s=HOUR_S, now_unix_s=1e9)) == 1
        assert [len(each.attempts()) for each in runs] == [0, 1, 1]

    def test_damaged_claims_are_of_no_age(self, run):
        """A claim that cannot be read cuts nothing off."""
        first = begin(run)
        stage(run, first, 20)
        second = begin(run)
        run.store.put(layout.claim_key(second), b"not json")
        assert run.sweep(second, older_than_s=HOUR_S, now_unix_s=1e9) == []


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_nothing_that_a_newer_start_may_be_reading_is_rotated(run, is_overtaken):
    """Also where an older start has decided to delete it, and has not come to it yet."""
    first = begin(run)
    refs = [commit(run, first, step) for step in (10, 20, 30)]
    keeping = Keeping(
        run_store=run,
        settings=Settings(telemetry=False, keep_last=1),
        events=EventLog(None),
        decide=lambda function: function(),
    )
    keeping.begin(refs)
    may_delete = threading.Event()
    keeping.thread.submit(may_delete.wait, 60)
    keeping.rotate(first)
    if is_overtaken:
        begin(run, refs[0])
    may_delete.set()
    keeping.thread.shutdown()
    assert [run.is_committed(ref) for ref in refs] == [is_overtaken, is_overtaken, True]


def test_a_checkpoint_that_cannot_be_read_now_is_not_left_behind(tmp_path):
    """Not damaged but out of reach: the start ends, and the next one restores it, not an older one."""
    cluster = LocalCluster(str(tmp_path / "run"), interval_steps=1_000_000, telemetry=False)
    try:
        cluster.start(jobs.train, {"steps": 30, "save_at": [20]}, world_size=1).results()
        shard = next((tmp_path / "run").rglob("step-0000000030*/shard-*.safetensors"))
        shard.rename(tmp_path / "elsewhere")
        # A folder in its place: the read fails, and not because the object is missing.
        shard.mkdir()
        (outcome,) = cluster.start(jobs.train, {"steps": 30}, world_size=1).outcomes()
        assert outcome["error"].startswith("CheckpointError: step 30 cannot be read at present"), outcome
        shard.rmdir()
        (tmp_path / "elsewhere").rename(shard)
        (result,) = cluster.start(jobs.train, {"steps": 30}, world_size=1).results()
        assert result["restored"] == 30
    finally:
        cluster.close()


def test_a_coordinator_lost_during_a_fresh_start_does_not_restore(tmp_path):
    """Its successor learns from the claim what the user had asked for."""
    url = str(tmp_path / "run")
    commit(RunStore(Store(url)), begin(RunStore(Store(url))), 10)
    cluster = LocalCluster(url, interval_steps=1_000_000, resume="fresh", telemetry=False)
    try:
        generation = cluster.start(jobs.train, {"steps": 5}, world_size=1)
        cluster.replace_coordinator()
        (result,) = generation.results()
        assert result["restored"] is None
    finally:
        cluster.close()


def test_a_cut_off_writers_last_checkpoint_keeps_its_shards(tmp_path):
    """Its manifest was written before it was fenced, so that a newer start may have chosen it."""
    cluster = LocalCluster(str(tmp_path / "run"), interval_steps=1_000_000, on_failure=0, telemetry=False)
    try:
        pause = {"pause_at": 12, "pause_file": str(tmp_path / "go")}
        generation = cluster.start(jobs.train, {"steps": 30, "save_at": [10, 20], **pause}, world_size=1)
        wait_until(lambda: (tmp_path / "go.reached0").exists(), "step 12")
        cluster.run_store.claim({})
        (tmp_path / "go").touch()
        (outcome,) = generation.outcomes()
        assert outcome["error"].startswith("FencedError"), outcome
        ref = next(ref for ref in cluster.run_store.attempts() if ref.step == 20)
        manifest = cluster.run_store.read_manifest(ref)
        stored = cluster.run_store.store.list_keys(layout.checkpoint_prefix(ref))
        names = {info.key.rpartition("/")[2] for info in stored}
        assert {shard.name for shard in manifest.shards} < names
    finally:
        cluster.close()
