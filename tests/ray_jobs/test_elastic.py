"""Nodes that come, are drained and die, under a job that takes what there is."""

import pytest
import ray

import raycheck
from raycheck.observe.events import read_events
from raycheck.store.objects import Store
from raycheck.store.run import RunStore
from tests.ray_jobs import jobs
from tests.ray_jobs.nodes import Node, drain
from tests.runtime.harness import wait_until

WAIT_S = 240


@pytest.fixture
def make_node(connected, tmp_path):
    made = []

    def make():
        made.append(Node(connected, tmp_path))
        return made[-1]

    yield make
    for node in made:
        node.kill()


def starts(folder, world_size):
    """Return for each start at this size the steps that rank 0 noted: the restored one, then each update."""
    logs = sorted(folder.glob(f"log-*-0-of-{world_size}"))
    return [[int(line) for line in log.read_text().splitlines()] for log in logs]


def wait_for_steps(folder, world_size, number=1):
    return wait_until(
        lambda: len(starts(folder, world_size)) >= number and starts(folder, world_size)[-1][10:],
        f"{world_size} workers",
        WAIT_S,
    )


@pytest.mark.timeout(900)
def test_growth_loses_no_step_and_a_drained_node_no_failure(connected, make_node, tmp_path):
    """1 worker, then 2 without a step taken twice; then Ray drains a node, which dies: saved before, by notice."""
    make_node()

    @ray.remote(num_cpus=0)
    def fit():
        scaling = {
            "resources_per_worker": {"CPU": 1, "place": 1},
            "elastic_resize_monitor_interval_s": 1.0,
        }
        callback = raycheck.AutoCheckpoint(interval_steps=10**9)
        return (
            jobs.trainer(
                tmp_path,
                callbacks=[callback],
                train_loop=jobs.train_elastic,
                num_workers=(1, 2),
                scaling=scaling,
            )
            .fit()
            .return_value
        )

    running = fit.remote()
    wait_for_steps(tmp_path, 1)
    run = RunStore(Store(f"{tmp_path}/run/raycheck"))
    assert run.attempts() == [], "no checkpoint but for the notices"

    second = make_node()
    wait_for_steps(tmp_path, 2)
    (alone,), (together,) = starts(tmp_path, 1), starts(tmp_path, 2)
    assert together[0] == alone[-1], "the resize goes on at the very step that was taken last"

    before = {ref.step for ref in run.attempts() if run.is_committed(ref)}
    drain(connected, second, deadline_s=30)
    wait_until(
        lambda: {r.step for r in run.attempts() if run.is_committed(r)} - before, "a checkpoint", WAIT_S
    )
    saved = max(ref.step for ref in run.attempts() if run.is_committed(ref))
    second.kill()
    wait_for_steps(tmp_path, 1, number=2)
    assert starts(tmp_path, 1)[1][0] >= saved
    (tmp_path / "stop").touch()
    ray.get(running, timeout=WAIT_S)
    rates = [run.claim_facts(claim)["failure_rate"]["failures"] for claim in run.claims()]
    assert rates == [{}, {}, {"preempted": 1}], "a resize is none, and this loss had been announced"
    # One, or on a busy machine another when the first had been long on its way: the end seems nearer then.
    told = [event["facts"] for event in read_events(run.store) if event["kind"] == "notice"]
    assert told
    assert {each["source"] for each in told} == {"drain"}
    assert all(0 < each["seconds_left"] <= 30 for each in told)
