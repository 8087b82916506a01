"""A real job as Prometheus and ``raycheck watch`` see it: one fit() for all of it."""

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import ray

import raycheck
from raycheck.observe.dashboard import make_dashboard
from raycheck.observe.metrics_names import METRICS, RUN_ID_TAG, RUN_NAME_TAG
from raycheck.runtime import watching
from tests.ray_jobs import jobs

DEADLINE_S = 240
# Its own: Ray goes on exporting the series of jobs that have ended on the same node.
RUN_NAME = "scraped"
HAS_METRICS = all(map(importlib.util.find_spec, ("opencensus", "prometheus_client")))


def wait_until(condition, what):
    """Poll, rarely enough to leave the machine to the job."""
    end_s = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end_s, f"gave up waiting for {what}"
        time.sleep(0.1)
    return value


class Watch:
    """A ``raycheck watch`` that writes to files: nobody need read while it runs."""

    def __init__(self, folder, *arguments):
        self._out, self._errors = folder / f"out-{len(arguments)}", folder / f"errors-{len(arguments)}"
        command = [Path(sys.executable).with_name("raycheck"), "watch", *map(str, arguments)]
        with self._out.open("w") as out, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, env={**os.environ, "COLUMNS": "80"}, stdout=out, stderr=errors
            )

    def lines(self):
        """Return the whole lines so far."""
        return self._out.read_text().rpartition("\n")[0].splitlines()

    def end(self):
        """Wait for its end; return exit code, lines and errors."""
        code = self.process.wait(DEADLINE_S)
        return code, self.lines(), self._errors.read_text()


def scrape():
    """Return what Ray exports, as lines."""
    # The head: other tests start and kill further nodes, which Ray remembers.
    (node,) = (each for each in ray.nodes() if "node:__internal_head__" in each["Resources"])
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return answer.read().decode().splitlines()


def samples(lines):
    """Return raycheck's series of this run, by name and tags. Those of any run have both tags."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"(ray_train_raycheck_\w+)\{(.*)\} (\S+)", line)
        if match:
            assert re.search(rf'{RUN_ID_TAG}="[0-9a-f]{{32}}"', match[2]), line
            name = re.search(rf'{RUN_NAME_TAG}="([^"]+)"', match[2])
            assert name, line
            if name[1] == RUN_NAME:
                found[match[1], match[2]] = float(match[3])
    return found


@pytest.fixture
def job(connected, tmp_path):
    """A job that trains until it is told to stop, and its result."""
    callback = raycheck.AutoCheckpoint(recovery_point_s=0.5, on_conflict="recovery_point")
    trainer = jobs.trainer(tmp_path, train_loop=jobs.train_elastic, callbacks=[callback], name=RUN_NAME)
    results = []
    thread = threading.Thread(target=lambda: results.append(trainer.fit()))
    thread.start()

    def stop():
        (tmp_path / "stop").touch()
        thread.join(DEADLINE_S)
        return results

    yield stop
    stop()


def committed(folder, after_step=0):
    """Return the newest committed step, of those after one; 0: none."""
    manifests = folder.glob(f"{RUN_NAME}/raycheck/checkpoints/*/manifest.json")
    steps = [int(path.parent.name.split("-")[1]) for path in manifests]
    return max((step for step in steps if step > after_step), default=0)


def names_of(found):
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in found}


EXPORTED = {metric.exported_name for metric in METRICS}
NEEDS_FAILED_SAVES = {"ray_train_raycheck_attempts_failed_total"}


def is_complete(found):
    """Whether all metrics are there, with values of after two commits and a restart: each is exported in its time."""
    value = {name: number for (name, _), number in found.items()}
    return (
        names_of(found) >= EXPORTED - NEEDS_FAILED_SAVES
        and value["ray_train_raycheck_step"] >= value["ray_train_raycheck_committed_step"] > 0
        and value["ray_train_raycheck_checkpoints_total"] == value["ray_train_raycheck_stall_s_count"] >= 2
        and value["ray_train_raycheck_restores_total"] == value["ray_train_raycheck_restore_s_count"] >= 1
        and value["ray_train_raycheck_world_size"] == 2
    )


def check_metrics():
    """Wait until all metrics are exported, and look at their values."""
    found = wait_until(lambda: is_complete(now := samples(scrape())) and now, "all metrics")
    assert names_of(found) <= EXPORTED
    value = {name: number for (name, _), number in found.items()}
    assert value["ray_train_raycheck_max_overhead_ratio"] == 0.035
    assert value["ray_train_raycheck_stored_bytes_total"] > 1000
    asked = set(re.findall(r"ray_train_raycheck_\w+", json.dumps(make_dashboard())))
    assert asked - {name for name, _ in found} <= NEEDS_FAILED_SAVES


@pytest.mark.timeout(900)
def test_a_job_is_scraped_and_watched(job, ray_head, tmp_path):
    """Every metric is exported with the run's tags; watch follows through killed worker and coordinator to the end."""
    first_step = wait_until(lambda: committed(tmp_path), "a checkpoint")
    wait_until(lambda: committed(tmp_path, first_step), "a second one")
    in_json = Watch(tmp_path, tmp_path / RUN_NAME, "--address", ray_head, "--json", "--every", "0.3")
    first = json.loads(wait_until(in_json.lines, "the first look")[0])
    assert first["source"] == "coordinator"
    assert first["generation"].startswith("g000001-")
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    wait_until(lambda: len(list(tmp_path.glob("log-*-0-of-2"))) == 2, "the restart")
    if HAS_METRICS:
        check_metrics()
    code, screen, errors = Watch(tmp_path, RUN_NAME, "--address", ray_head, "--once").end()
    assert code == 0, errors
    assert screen[0].startswith(f"{RUN_NAME}, g2, 2 ranks, ")
    assert any(re.match(r"overhead .* the bound is 3.5 %", line) for line in screen)
    assert any(re.search(r"ago  restored step \d+: all ranks restored it, from g1", line) for line in screen)
    assert all(len(line) <= 80 for line in screen)
    (status,) = watching.ask_all().values()
    os.kill(status["pid"], signal.SIGKILL)
    # Further than what was under way can have been.
    wait_until(lambda: committed(tmp_path, status["step"] + 200), "checkpoints by its successor")
    looked = len(in_json.lines())
    wait_until(lambda: len(in_json.lines()) > looked + 1, "looks at it")
    (result,) = job()
    assert result.error is None
    code, lines, errors = in_json.end()
    assert code == 0, errors
    looks = list(map(json.loads, lines))
    assert {look["generation"][:7] for look in looks} >= {"g000001", "g000002"}
    assert {event["kind"] for look in looks for event in look["events"]} >= {
        "restored",
        "resumed",
        "checkpoint",
    }
    counts = [look["num_checkpoints"] or 0 for look in looks]
    assert any(later < earlier for earlier, later in itertools.pairwise(counts)), (
        "one that is killed counts anew"
    )
    restores = [event["text"] for look in looks for event in look["events"] if event["kind"] == "restored"]
    assert len(restores) == 2
    assert re.search(r"out of (memory|storage|both), in \d", restores[1]), restores
    told = [(event["unix_s"], event["kind"]) for look in looks for event in look["events"]]
    assert len(told) == len(set(told))
    code, lines, errors = Watch(tmp_path, "--address", ray_head, "--once").end()
    assert (code, lines) == (1, [])
    assert "no job with raycheck runs in the cluster" in errors
    if not HAS_METRICS:
        pytest.skip("all but the metrics was tested: ray[default], which exports them, is not installed")
