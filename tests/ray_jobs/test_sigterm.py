"""SIGTERM to a worker of Ray Train."""

import os
import signal

import psutil
import pytest
import ray

import raycheck
from raycheck.store.objects import Store
from raycheck.store.run import RunStore
from tests.ray_jobs import jobs
from tests.ray_jobs.test_elastic import WAIT_S, starts, wait_for_steps
from tests.runtime.harness import wait_until


@pytest.mark.timeout(600)
def test_a_worker_that_is_told_to_end_saves_first(connected, tmp_path):
    """Ray's own handler would end it at once: ours saves, and leaves the end to Ray's. No failure is counted."""

    @ray.remote(num_cpus=0)
    def fit():
        callback = raycheck.AutoCheckpoint(interval_steps=10**9, sigterm_grace_s=3.0)
        return jobs.trainer(tmp_path, callbacks=[callback], train_loop=jobs.train_elastic).fit().return_value

    running = fit.remote()
    wait_for_steps(tmp_path, 2)
    run = RunStore(Store(f"{tmp_path}/run/raycheck"))
    assert run.attempts() == []
    pid = int((tmp_path / "pid-1").read_text())
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: any(map(run.is_committed, run.attempts())), "a checkpoint", WAIT_S)
    wait_until(lambda: not psutil.pid_exists(pid), "its end", WAIT_S)
    wait_for_steps(tmp_path, 2, number=2)
    first, second = starts(tmp_path, 2)
    assert first[0] == 0
    assert second[0] in [ref.step for ref in run.attempts() if run.is_committed(ref)]
    (tmp_path / "stop").touch()
    ray.get(running, timeout=WAIT_S)
    rates = [run.claim_facts(claim)["failure_rate"]["failures"] for claim in run.claims()]
    assert rates == [{}, {"preempted": 1}]
