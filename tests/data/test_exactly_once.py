"""Exactly once per epoch on real processes, judged from outside, and by ``raycheck audit``."""

import json

import pytest
from typer.testing import CliRunner

from raycheck.cli import app
from tests.data import jobs, judge
from tests.runtime.harness import LocalCluster, wait_until

DEADLINE_S = 240

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def make_cluster(tmp_path):
    clusters = []

    def make(**settings):
        cluster = LocalCluster(
            str(tmp_path / "run" / "raycheck"), None, **{"interval_steps": 1_000_000, **settings}
        )
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.close()


def audit(path, *options):
    """Run ``raycheck audit --json``; return exit code and report."""
    done = CliRunner().invoke(app, ["audit", str(path), "--json", *options])
    return done.exit_code, json.loads(done.stdout)


def all_wait(tmp_path, count):
    return lambda: len(list(tmp_path.glob("reached-*"))) == count


def run_chain(cluster, tmp_path, world_sizes, **config):
    """Run one generation per world size: save, train on, be killed; the last one to the end."""
    config = {"folder": str(tmp_path), **config}
    num_waiting = 0
    for number, world_size in enumerate(world_sizes[:-1]):
        # Saved 5 steps into each, killed 2 steps later: those two are lost.
        at = {"save_at": [5 * number + 5], "pause_at": 5 * number + 7}
        group = cluster.start(jobs.train, {**config, **at}, world_size=world_size)
        num_waiting += world_size
        wait_until(all_wait(tmp_path, num_waiting), "the step to be killed at", DEADLINE_S)
        group.kill_all()
    return cluster.start(jobs.train, config, world_size=world_sizes[-1]).results(DEADLINE_S)


def test_every_item_once_per_epoch_over_kills_and_resizes(make_cluster, tmp_path):
    """2 -> 1 -> 2 workers, each killed after steps that are lost: judge, audit and loss curve agree."""
    cluster = make_cluster()
    run_chain(cluster, tmp_path, (2, 1, 2), num_workers=1)
    used = judge.counted(tmp_path, tmp_path / "run" / "raycheck")
    assert {epoch: sorted(items.elements()) for epoch, items in used.items()} == {
        epoch: list(range(jobs.LENGTH)) for epoch in range(2)
    }
    noted = sum(len(record["items"]) for record in judge.notes(tmp_path))
    assert noted == 2 * jobs.LENGTH + 2 * 2 * 12, "two steps of 12 items were lost twice"
    losses = judge.losses(tmp_path, tmp_path / "run" / "raycheck")
    assert [losses[step] for step in sorted(losses)] == pytest.approx(jobs.straight()["losses"], rel=1e-9)
    code, report = audit(tmp_path / "run")
    assert code == 0, report
    (loader,) = report["loaders"]
    assert [epoch["epoch"] for epoch in loader["epochs"]] == [0, 1]
    assert [g["world_size"] for g in report["generations"]] == [2, 1, 2]
    ids = [generation["generation"] for generation in report["generations"]]
    assert [epoch["pieces"] for epoch in loader["epochs"]] == [
        [[0, 60, ids[0], 2], [60, 98, ids[1], 1]],
        [[0, 12, ids[1], 1], [12, 98, ids[2], 2]],
    ]
    assert [epoch["num_repeats"] for epoch in loader["epochs"]] == [0, 0]


def test_ranks_that_have_come_apart_commit_nothing(make_cluster, tmp_path, caplog):
    """Rank 0 alone looks at a batch: no checkpoint of a position that only one rank has, and training goes on."""
    cluster = make_cluster()
    config = {"folder": str(tmp_path), "peek": True, "save_at": [2], "epochs": 1, "stop_at": 4}
    results = cluster.start(jobs.train, config, world_size=2).results(DEADLINE_S)
    assert [result["saved"] for result in results] == [[False], [False]]
    assert cluster.committed_steps() == []
    assert "ranks are at different places in the data" in caplog.text
    assert "rank 0 at 'loader: epoch 0 after 36 items'" in caplog.text
    assert "rank 1 at 'loader: epoch 0 after 24 items'" in caplog.text
    code, report = audit(tmp_path / "run")
    assert code == 2
    assert "no checkpoint" in report["unknown"][0]


def test_k2_losses_are_those_of_an_uninterrupted_run_bit_for_bit_at_the_same_world_size(
    make_cluster, tmp_path
):
    """Killed and resumed on one rank: every loss and the end are equal, not only close."""
    straight = jobs.straight()
    (result,) = run_chain(make_cluster(), tmp_path, (1, 1))
    losses = judge.losses(tmp_path, tmp_path / "run" / "raycheck")
    assert [losses[step] for step in sorted(losses)] == straight["losses"]
    assert result["digest"] == straight["digest"]
