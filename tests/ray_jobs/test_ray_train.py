"""raycheck inside real Ray Train jobs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck
from raycheck.store.objects import Store
from raycheck.store.run import RunStore
from tests.ray_jobs import jobs
from tests.runtime import jobs as plain_jobs
from tests.runtime.harness import LocalCluster, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def straight():
    """The end of an uninterrupted run, made without Ray."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(f"{folder}/run", interval_steps=10**6)
        try:
            yield cluster.start(plain_jobs.train, {"steps": 60, "step_s": 0}, world_size=2).results()[0]
        finally:
            cluster.close()


def committed(folder):
    run = RunStore(Store(f"{folder}/run/raycheck"))
    return [ref.step for ref in run.attempts() if run.is_committed(ref)]


def cause_of(error: BaseException) -> str:
    """Return the text of an error and of all that it came from."""
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


def test_a_killed_worker_is_restarted_and_the_run_ends_like_an_undisturbed_one(connected, tmp_path, straight):
    """SIGKILL under Ray Train: one restart, the committed step restored, the same end."""
    trainer = jobs.trainer(
        tmp_path, save_at=[20, 30], die_after=35, pause_at=34, pause_file=str(tmp_path / "go")
    )
    (tmp_path / "go").touch()
    result = trainer.fit()
    assert result.return_value["digest"] == straight["digest"]
    assert result.return_value["losses"] == straight["losses"][result.return_value["restored"] :]
    assert result.return_value["restored"] == 30
    assert committed(tmp_path)[-1] == 60
    run = RunStore(Store(f"{tmp_path}/run/raycheck"))
    seen = [run.claim_facts(claim)["failure_rate"]["failures"] for claim in run.claims()]
    assert seen == [{}, {"worker": 1}], "a killed process is told from the user's own exception"


def test_a_killed_driver_resumes_from_s3_with_the_same_command(
    ray_head, tmp_path, s3_url, s3_server, straight
):
    """The job is gone with its driver; running it again goes on from S3."""
    endpoint = s3_server.endpoint.removeprefix("http://")
    storage = f"{s3_url.url}?endpoint_override={endpoint}&scheme=http"
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
        "AWS_EC2_METADATA_DISABLED": "true",
    }

    def command(**config):
        arguments = json.dumps({"save_at": [30], **config})
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ray_jobs.driver", ray_head, str(tmp_path), storage, arguments],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    first = command(pause_at=40, pause_file=str(tmp_path / "go"))
    wait_until(lambda: all((tmp_path / f"go.reached{rank}").exists() for rank in range(2)), "step 40", 120)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    again = command()
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0
    result = json.loads(output.decode().strip().splitlines()[-1])
    assert result["restored"] == 30
    assert result["digest"] == straight["digest"]


def test_killed_actors_of_ours_come_back_and_saving_goes_on(connected, tmp_path):
    """SIGKILL of coordinator and agent while the job trains: it does not notice, and commits go on."""
    stop = tmp_path / "stop"

    @ray.remote(num_cpus=0)
    def fit():
        callback = raycheck.AutoCheckpoint(interval_steps=1, keep_last=10**6)
        config = {"steps": 10**6, "step_s": 0.005, "stop_file": str(stop)}
        return jobs.trainer(tmp_path, callbacks=[callback], max_failures=0, **config).fit().return_value

    names = ("CoordinatorActor", "AgentActor")
    # Those of a job before, or of another cluster on this machine.
    others = {pid for name in names for pid in pids_of(f"ray::{name}")}
    running = fit.remote()
    wait_until(lambda: committed(tmp_path), "a first commit", 120)
    for name in names:
        (pid,) = set(pids_of(f"ray::{name}")) - others
        os.kill(pid, signal.SIGKILL)
        before = committed(tmp_path)[-1]
        wait_until(lambda before=before: committed(tmp_path)[-1] > before, f"a commit without {name}", 120)
    stop.touch()
    result = ray.get(running)
    assert committed(tmp_path)[-1] == len(result["losses"])


def pids_of(title):
    """Return the processes that Ray has given this title."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                command = Path("/proc", entry, "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(title.encode()):
                found.append(int(entry))
    return found


def test_a_run_switched_on_by_the_environment(connected, tmp_path, monkeypatch):
    """RAY_TRAIN_CALLBACKS and RAYCHECK_SETTINGS: no change in the driver's code."""
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "raycheck.AutoCheckpoint")
    monkeypatch.setenv("RAYCHECK_SETTINGS", '{"interval_steps": 1000000, "keep_last": 1}')
    jobs.trainer(tmp_path, callbacks=[], steps=10, save_at=[3, 5]).fit()
    wait_until(lambda: committed(tmp_path) == [5, 10], "the last two, since Ray Train has the last one")


def test_without_the_option_attach_says_what_to_add(connected, tmp_path):
    """NotEnabledError with the line; optional=True trains on."""
    with pytest.raises(Exception, match="NotEnabledError") as error:
        jobs.trainer(
            tmp_path, callbacks=[], train_loop=jobs.attach_nothing, num_workers=1, max_failures=0
        ).fit()
    assert "RunConfig(callbacks=[raycheck.AutoCheckpoint()])" in cause_of(error.value)
    jobs.trainer(tmp_path, callbacks=[], train_loop=jobs.attach_nothing, num_workers=1, optional=True).fit()


def test_in_rays_local_mode_attach_does_nothing(tmp_path, caplog):
    """num_workers=0 runs the loop in this process: one warning, no checkpoint."""
    trainer = TorchTrainer(
        jobs.attach_nothing,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(tmp_path), callbacks=[raycheck.AutoCheckpoint()]),
    )
    trainer.fit()
    assert "attach() does nothing" in caplog.text


@pytest.mark.parametrize(
    ("storage", "options", "expected"),
    [
        ("nosuch://bucket/x", None, "nosuch"),
        ("/proc/raycheck", None, "/proc/raycheck"),
        ("s3://no-such-bucket-here/x", {}, "no-such-bucket-here"),
        ("s3://raycheck-tests/x", {"key": "wrong", "secret": "very-secret"}, "raycheck-tests"),
    ],
)
def test_a_store_that_cannot_work_ends_the_run_before_the_first_step(
    connected, tmp_path, s3_server, storage, options, expected
):
    """One clear error that names the place, at once although failures are tolerated, and no secret in it."""
    if options is not None:
        options = {**s3_server.options, **options}
    callback = raycheck.AutoCheckpoint(storage_path=storage, storage_options=options)
    with pytest.raises(Exception) as error:
        jobs.trainer(tmp_path, callbacks=[callback], max_failures=-1).fit()
    text = cause_of(error.value)
    assert expected in text
    assert "very-secret" not in text
    assert not list(tmp_path.glob("pid-*")), "no worker has started its train function"
