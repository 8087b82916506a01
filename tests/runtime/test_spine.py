"""From step() to the manifest and back, with real processes and SIGKILL."""

import dataclasses
import json
import os

import pytest

from raycheck.core.lineage import CheckpointRef
from raycheck.store.objects import Store
from raycheck.store.run import RunStore
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster, wait_until


@pytest.fixture
def make_cluster(tmp_path):
    clusters = []

    def make(url=None, options=None, **settings):
        cluster = LocalCluster(
            url or str(tmp_path / "run"), options, **{"interval_steps": 1_000_000, **settings}
        )
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.fixture(scope="module")
def straight():
    """What an uninterrupted run of 60 steps on 2 ranks returns."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(folder + "/run", interval_steps=1000)
        try:
            yield cluster.start(jobs.train, {"steps": 60, "step_s": 0}, world_size=2).results()
        finally:
            cluster.close()


def pausing(tmp_path, step, **config):
    return {"steps": 60, "pause_at": step, "pause_file": str(tmp_path / "go"), **config}


def reached(tmp_path, ranks):
    return lambda: all((tmp_path / f"go.reached{rank}").exists() for rank in ranks)


def test_a_killed_worker_group_resumes_and_ends_like_an_undisturbed_one(make_cluster, tmp_path, straight):
    """SIGKILL in mid-step; the next group restores a committed step and every loss is the same."""
    cluster = make_cluster()
    first = cluster.start(jobs.train, pausing(tmp_path, 33, save_at=[20, 30]), world_size=2)
    wait_until(reached(tmp_path, [0, 1]), "step 33")
    first.kill(1)
    first.kill(0)
    second = cluster.start(jobs.train, {"steps": 60}, world_size=2).results()
    for rank in range(2):
        assert second[rank]["restored"] == 30
        assert second[rank]["losses"] == straight[rank]["losses"][30:]
        assert second[rank]["digest"] == straight[rank]["digest"]
        assert second[rank]["lr"] == straight[rank]["lr"]
        assert second[rank]["seen"] == 60


def test_a_new_coordinator_process_resumes_from_the_store_alone(make_cluster, tmp_path, straight):
    """The whole job dies, agents and all; the same command goes on from storage."""
    cluster = make_cluster()
    first = cluster.start(jobs.train, pausing(tmp_path, 25, save_at=[20]), world_size=2)
    wait_until(reached(tmp_path, [0, 1]), "step 25")
    first.kill_all()
    again = make_cluster(cluster.url)
    results = again.start(jobs.train, {"steps": 60}, world_size=2).results()
    assert [result["restored"] for result in results] == [20, 20]
    assert results[0]["digest"] == straight[0]["digest"]
    assert again.run_store.claims()[-1].number == 2


def test_the_end_of_training_is_checkpointed(make_cluster):
    """close() commits the last step, and a finished run that is started again has nothing to do."""
    cluster = make_cluster()
    cluster.start(jobs.train, {"steps": 7}, world_size=2).results()
    assert cluster.committed_steps() == [7]
    again = cluster.start(jobs.train, {"steps": 7}, world_size=2).results()
    assert [result["restored"] for result in again] == [7, 7]
    assert again[0]["losses"] == []
    assert cluster.committed_steps() == [7], "no step was taken, so nothing was saved"


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3)])
def test_another_world_size_resumes(make_cluster, tmp_path, sizes):
    """K1: no converter, no missing keys, at fewer and at more ranks."""
    cluster = make_cluster()
    first = cluster.start(jobs.train, pausing(tmp_path, 25, save_at=[20]), world_size=sizes[0])
    wait_until(reached(tmp_path, range(sizes[0])), "step 25")
    first.kill_all()
    results = cluster.start(jobs.train, {"steps": 30}, world_size=sizes[1]).results()
    assert [result["restored"] for result in results] == [20] * sizes[1]
    assert len({result["digest"] for result in results}) == 1


def test_a_staged_snapshot_is_committed_after_its_workers_died(make_cluster, tmp_path):
    """The segment outlives the worker: what was complete is uploaded and the next group has it."""
    cluster = make_cluster(upload_bytes_per_s=200_000)
    stop = tmp_path / "never"
    # An upload of a second or more: it is under way when the workers are gone.
    config = {"steps": 10_000, "width": 4096, "stop_file": str(stop)}
    cluster.settings = dataclasses.replace(cluster.settings, interval_steps=1)
    cluster.replace_coordinator()
    first = cluster.start(jobs.train, config, world_size=2)
    wait_until(
        lambda: (g := cluster.coordinator._generation).commits and g.commits.is_fully_staged, "a snapshot"
    )
    plan = cluster.coordinator._generation.commits.plan
    first.kill_all()
    results = cluster.start(jobs.train, {"steps": plan.step, "width": 4096}, world_size=2).results()
    assert results[0]["restored"] == plan.step


@pytest.fixture
def endless(make_cluster, tmp_path):
    """A run that checkpoints all the time until it is told to stop."""
    cluster = make_cluster(interval_steps=1, keep_last=1000)
    stop = tmp_path / "stop"
    generation = cluster.start(jobs.train, {"steps": 10**6, "stop_file": str(stop)}, world_size=2)
    wait_until(lambda: cluster.committed_steps(), "a first commit")
    return cluster, generation, stop


def end_of(generation, stop, cluster):
    """Stop the run; return its last step, which must be committed."""
    stop.touch()
    results = generation.results()
    last = results[0]["first"] + len(results[0]["losses"])
    assert max(cluster.committed_steps()) == last
    return last


def test_an_agent_that_is_killed_is_replaced_and_saving_goes_on(endless):
    """Workers reconnect to the new agent and hand it their segment."""
    cluster, generation, stop = endless
    cluster.kill_agent("node0")
    cluster.start_agent("node0")
    before = max(cluster.committed_steps())
    wait_until(lambda: max(cluster.committed_steps()) > before, "a commit by the new agent")
    end_of(generation, stop, cluster)


def test_a_coordinator_that_is_lost_comes_back_from_what_agents_tell(endless):
    """Empty state, same generation: training does not notice, and commits go on."""
    cluster, generation, stop = endless
    cluster.replace_coordinator()
    before = max(cluster.committed_steps())
    wait_until(lambda: max(cluster.committed_steps()) > before, "a commit by the new coordinator")
    assert cluster.status()["generation"] == str(generation.id)
    end_of(generation, stop, cluster)


def test_a_coordinator_lost_during_restore_takes_the_vote_up_again(make_cluster, tmp_path):
    """Agents ask again on behalf of ranks that have not joined."""
    cluster = make_cluster()
    cluster.start(jobs.train, {"steps": 20}, world_size=2).results()
    generation = cluster.start(jobs.train, {"steps": 40}, world_size=2)
    cluster.replace_coordinator()
    results = generation.results()
    assert [result["restored"] for result in results] == [20, 20]


def test_a_missing_shard_makes_all_ranks_fall_back_together(make_cluster, tmp_path, caplog):
    """A1, P2: the newest checkpoint lacks an object; all restore the one before and one warning names it."""
    cluster = make_cluster()
    cluster.start(jobs.train, {"steps": 30, "save_at": [10, 20]}, world_size=2).results()
    assert cluster.committed_steps() == [10, 20, 30]
    ref = cluster.run_store.attempts()[-1]
    victim = next((tmp_path / "run").rglob(f"*{ref.step:010d}*/shard-00001*.safetensors"))
    victim.unlink()
    results = cluster.start(jobs.train, {"steps": 30}, world_size=2).results()
    assert [result["restored"] for result in results] == [20, 20]
    warnings = [
        record.getMessage() for record in caplog.records if "cannot be restored" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert "step 30" in warnings[0]
    assert victim.name in warnings[0]


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "no sums"])
def test_damaged_bytes_are_found_before_any_weight_changes(make_cluster, tmp_path, damage):
    """P2: a flipped byte, a short shard, swapped shards, missing checksums: the older one is used."""
    cluster = make_cluster()
    cluster.start(jobs.train, {"steps": 20, "width": 512, "save_at": [10]}, world_size=2).results()
    folder = next((tmp_path / "run").rglob("step-0000000020*"))
    shards = sorted(folder.glob("*.safetensors"))
    if damage == "flip":
        data = bytearray(shards[0].read_bytes())
        data[-5000] ^= 1
        shards[0].write_bytes(data)
    elif damage == "cut":
        shards[0].write_bytes(shards[0].read_bytes()[:-100])
    elif damage == "swap":
        one, two = shards[0].read_bytes(), shards[1].read_bytes()
        shards[0].write_bytes(two), shards[1].write_bytes(one)
    else:
        next(folder.glob("*.sums")).unlink()
    results = cluster.start(jobs.train, {"steps": 20, "width": 512}, world_size=2).results()
    assert [result["restored"] for result in results] == [10, 10]


def test_an_attempt_without_a_manifest_is_never_selected(make_cluster, tmp_path, caplog):
    """A1, A4: shards alone are nothing; one warning names the step."""
    cluster = make_cluster()
    cluster.start(jobs.train, {"steps": 20}, world_size=2).results()
    newest = cluster.run_store.attempts()[-1]
    later = CheckpointRef(30, newest.generation, 99)
    cluster.run_store.store.put(
        f"checkpoints/step-0000000030-{newest.generation}-p000099/shard-00000-of-00002.x", b"x"
    )
    assert later in cluster.run_store.attempts()
    results = cluster.start(jobs.train, {"steps": 20}, world_size=2).results()
    assert results[0]["restored"] == 20
    assert sum("step 30 is incomplete" in record.getMessage() for record in caplog.records) == 1


def test_another_models_checkpoint_is_refused_on_every_rank(make_cluster):
    """All that differs is listed, nothing is loaded, and no older one is tried."""
    cluster = make_cluster()
    cluster.start(jobs.train, {"steps": 20}, world_size=2).results()
    outcomes = cluster.start(jobs.train, {"steps": 20, "width": 64}, world_size=2).outcomes()
    for outcome in outcomes:
        assert outcome["error"].startswith("CheckpointMismatchError")
        assert "shape: model.0.weight is torch.float32 [32, 8] in the checkpoint" in outcome["error"]


def test_state_that_cannot_be_saved_is_refused_with_its_path(make_cluster):
    """E3: on every rank, before the first step."""
    cluster = make_cluster()
    outcomes = cluster.start(jobs.attach_unsavable, world_size=2).outcomes()
    assert all(o["error"].startswith("StateError: mine.a[0].b is a") for o in outcomes)


def test_ranks_that_differ_keep_their_own_state(make_cluster):
    """F6: without a process group between them, parameters diverge; each rank gets its own back."""
    cluster = make_cluster()
    first = cluster.start(
        jobs.train, {"steps": 30, "diverge": True, "save_at": [10, 20]}, world_size=2
    ).results()
    assert first[0]["digest"] != first[1]["digest"]
    again = cluster.start(jobs.train, {"steps": 30, "diverge": True}, world_size=2).results()
    assert [r["restored"] for r in again] == [30, 30]
    assert [r["digest"] for r in again] == [r["digest"] for r in first]


def test_a_cut_off_generation_is_fenced_and_changes_nothing(make_cluster, tmp_path):
    """A writer whose successor has started gets no acknowledgement, and what it writes never counts."""
    old = make_cluster(on_failure=0)
    generation = old.start(jobs.train, pausing(tmp_path, 15, save_at=[10, 20]), world_size=2)
    wait_until(reached(tmp_path, [0, 1]), "step 15")
    new = make_cluster(old.url)
    assert new.start(jobs.train, {"steps": 12}, world_size=2).results()[0]["restored"] == 10
    (tmp_path / "go").touch()
    outcomes = generation.outcomes()
    assert all(outcome["error"].startswith("FencedError") for outcome in outcomes), outcomes
    again = make_cluster(old.url)
    assert again.start(jobs.train, {"steps": 13}, world_size=2).results()[0]["restored"] == 12


def test_retention_keeps_the_newest_and_remembers_across_restarts(make_cluster):
    """C4: keep_last counts what earlier generations committed."""
    cluster = make_cluster(keep_last=2)
    cluster.start(jobs.train, {"steps": 20, "save_at": [10]}, world_size=1).results()
    again = make_cluster(cluster.url, keep_last=2)
    again.start(jobs.train, {"steps": 40, "save_at": [30]}, world_size=1).results()
    wait_until(lambda: again.committed_steps() == [30, 40], "the deletion of old checkpoints")


def test_save_and_wait(make_cluster):
    """block=True commits the present step when every rank asks, and returns when one alone does (H2)."""
    cluster = make_cluster()
    results = cluster.start(jobs.train, {"steps": 9, "save_at": [5]}, world_size=2).results()
    assert [r["blocked"] for r in results] == [True, True]
    assert cluster.committed_steps() == [5, 9]
    results = cluster.start(jobs.train, {"steps": 20, "save_rank0_at": 15}, world_size=2).results()
    assert results[0]["blocked"] is False


def test_an_exception_is_not_masked_and_does_not_wait(make_cluster):
    """M3: the user's error comes out as it was."""
    cluster = make_cluster()
    outcomes = cluster.start(jobs.end_in_error, world_size=1).outcomes()
    assert outcomes == [{"error": "ValueError: the user's own"}]


def test_resume_at_a_step_rolls_back_and_leaves_the_rest_behind(make_cluster):
    """resume=step starts a lineage in which later checkpoints do not count."""
    cluster = make_cluster()
    cluster.start(jobs.train, {"steps": 30, "save_at": [10, 20]}, world_size=1).results()
    back = make_cluster(cluster.url, resume=20)
    assert back.start(jobs.train, {"steps": 25}, world_size=1).results()[0]["restored"] == 20
    auto = make_cluster(cluster.url)
    assert auto.start(jobs.train, {"steps": 25}, world_size=1).results()[0]["restored"] == 25


def test_memory_is_gone_after_every_kind_of_end(make_cluster, tmp_path):
    """No memory file is held once workers are dead and the attempt is over."""
    cluster = make_cluster()
    first = cluster.start(jobs.train, pausing(tmp_path, 15), world_size=2)
    wait_until(reached(tmp_path, [0, 1]), "step 15")
    agent = cluster.agents["node0"].pid

    def held():
        links = []
        for fd in os.listdir(f"/proc/{agent}/fd"):
            try:
                links.append(os.readlink(f"/proc/{agent}/fd/{fd}"))
            except FileNotFoundError:
                continue
        return [link for link in links if "memfd:raycheck" in link]

    assert len(held()) >= 2
    first.kill_all()
    wait_until(lambda: not held(), "the agent to let go of dead workers' memory")


def test_a_record_of_each_start_is_in_the_store(make_cluster):
    """Claims and records say where each generation came from."""
    cluster = make_cluster()
    cluster.start(jobs.train, {"steps": 10}, world_size=1).results()
    cluster.start(jobs.train, {"steps": 20}, world_size=1).results()
    records = RunStore(Store(cluster.url)).records()
    assert [record.parent.step if record.parent else None for record in records] == [None, 10]
    claim = json.loads(
        cluster.run_store.store.get(f"generations/000001-{records[0].generation.id}.claim.json")
    )
    assert claim["world_size"] == 1


def test_the_same_on_a_real_s3_server(make_cluster, tmp_path, straight, s3_url):
    """Kill everything in mid-step; another coordinator and another agent resume from S3."""
    cluster = make_cluster(s3_url.url, s3_url.options)
    first = cluster.start(jobs.train, pausing(tmp_path, 33, save_at=[20, 30]), world_size=2)
    wait_until(reached(tmp_path, [0, 1]), "step 33")
    first.kill_all()
    again = make_cluster(s3_url.url, s3_url.options)
    results = again.start(jobs.train, {"steps": 60}, world_size=2).results()
    assert [result["restored"] for result in results] == [30, 30]
    assert [result["digest"] for result in results] == [result["digest"] for result in straight]
    assert again.committed_steps() == [20, 30, 60]


def test_failures_are_remembered_across_jobs(make_cluster, tmp_path):
    """A killed job counts as a failure for the next one; a normal end does not."""
    cluster = make_cluster()
    first = cluster.start(jobs.train, pausing(tmp_path, 15, save_at=[10]), world_size=1)
    wait_until(reached(tmp_path, [0]), "step 15")
    first.kill_all()
    second = make_cluster(cluster.url)
    second.start(jobs.train, {"steps": 20}, world_size=1).results()
    third = make_cluster(cluster.url)
    third.start(jobs.train, {"steps": 30}, world_size=1).results()
    facts = [
        cluster.run_store.claim_facts(claim)["failure_rate"]["failures"]
        for claim in cluster.run_store.claims()
    ]
    assert facts == [{}, {"worker": 1}, {"worker": 1}]
    # The ranks are told that all is done while it is being written.
    last = cluster.run_store.claims()[-1]
    end = wait_until(lambda: cluster.run_store.end_facts(last), "the end to be noted")
    assert end["failure_rate"]["gpu_days"] > 0


def test_a_coordinator_that_restarts_remembers_failures(make_cluster, tmp_path):
    """Those of its predecessor are in the claim of the generation that it takes up."""
    cluster = make_cluster()
    config = pausing(tmp_path, 15)
    first = cluster.start(jobs.train, config, world_size=1)
    wait_until(reached(tmp_path, [0]), "step 15")
    first.kill_all()
    second = cluster.start(jobs.train, {**config, "pause_file": str(tmp_path / "again")}, world_size=1)
    wait_until((tmp_path / "again.reached0").exists, "step 15 again")
    cluster.replace_coordinator()
    wait_until(lambda: cluster.status()["generation"], "the new coordinator to take the generation up")
    second.kill_all()
    third = cluster.start(jobs.train, {"steps": 20}, world_size=1)
    assert cluster.run_store.claim_facts(third.id)["failure_rate"]["failures"] == {"worker": 2}


def test_limits_that_conflict_stop_a_run_that_asked_for_it(make_cluster):
    """on_conflict="error": training ends with the message that says what cannot hold together."""
    cluster = make_cluster(
        interval_steps=None, max_overhead=1e-9, recovery_point_s=0.5, on_conflict="error", min_interval_s=None
    )
    outcomes = cluster.start(jobs.train, {"steps": 10**6, "step_s": 0.01}, world_size=1).outcomes()
    assert "SaveError" in outcomes[0]["error"]
    assert "max_overhead" in outcomes[0]["error"]


def test_a_second_attach_in_one_process_is_an_error(make_cluster):
    """State goes into one call."""
    outcomes = make_cluster().start(jobs.attach_twice, world_size=1).outcomes()
    assert outcomes[0]["error"].startswith("RuntimeError: raycheck.attach() was called twice")


def test_a_node_without_room_refuses_before_the_first_step(make_cluster):
    """G5: state that exceeds the node's share is an error with the numbers, not a kill for memory."""
    cluster = make_cluster(node_memory_bytes=100_000)
    outcomes = cluster.start(jobs.train, {"steps": 5, "width": 4096}, world_size=2).outcomes()
    for outcome in outcomes:
        assert outcome["error"].startswith("StateError")
        assert "50,000" in outcome["error"] or "50000" in outcome["error"], outcome["error"]
