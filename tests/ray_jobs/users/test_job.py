"""A job folder as a user submits it: switched on by its runtime environment alone, killed, submitted again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobSubmissionClient

FOLDER = Path(__file__).parents[3] / "examples" / "job"
START_S = 240


def wait_until(condition, what):
    """Poll, less often than elsewhere: each look is a request."""
    end_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end_s, f"gave up waiting for {what}"
        time.sleep(0.2)


def submit(server, name, storage):
    done = subprocess.run(
        [
            Path(sys.executable).with_name("ray"), "job", "submit", "--no-wait", "--submission-id", name,
            "--working-dir", ".", "--runtime-env", "runtime_env.yaml", "--", "python", "train.py", storage,
        ],
        env={**os.environ, "RAY_API_SERVER_ADDRESS": server, "RAY_AUTH_MODE": "disabled"},
        cwd=FOLDER, capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def driver_of(storage):
    """Return the job's own process, once it runs."""
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[1:] == ["train.py", storage]:
            return process
    return None


def committed_steps(s3_url):
    listed = s3_url.client.list_objects_v2(Bucket=s3_url.bucket, Prefix=f"{s3_url.prefix}/")
    keys = [found["Key"] for found in listed.get("Contents", ())]
    return sorted(int(re.search(r"/step-(\d+)-", key)[1]) for key in keys if key.endswith("/manifest.json"))


@pytest.mark.timeout(900)
def test_a_submitted_job_goes_on_when_it_is_submitted_again(job_server, s3_url, s3_server):
    """Stopped, then killed: the same command resumes from S3, and Ray Train has the last checkpoint."""
    endpoint = s3_server.endpoint.removeprefix("http://")
    storage = f"{s3_url.url}?endpoint_override={endpoint}&scheme=http"
    jobs, names = JobSubmissionClient(job_server), [f"{s3_url.prefix}-{number}" for number in range(3)]

    def run_until(name, condition):
        submit(job_server, name, storage)
        ended = lambda: jobs.get_job_status(name).is_terminal()  # noqa: E731  it closes over the name
        wait_until(lambda: ended() or condition(), "the job")
        assert not ended() or condition is never, jobs.get_job_logs(name)

    def end_of(name):
        wait_until(lambda: jobs.get_job_status(name).is_terminal(), "its end")
        output = jobs.get_job_logs(name)
        return jobs.get_job_status(name), output, int(re.search(r"training begins at step (\d+)", output)[1])

    run_until(names[0], lambda: committed_steps(s3_url))
    before = committed_steps(s3_url)[-1]
    jobs.stop_job(names[0])
    status, output, begun = end_of(names[0])
    assert (status, begun) == ("STOPPED", 0)
    stopped = committed_steps(s3_url)[-1]
    assert stopped > before, output

    run_until(names[1], lambda: committed_steps(s3_url)[-1] > stopped)
    os.kill(driver_of(storage).pid, signal.SIGKILL)
    status, _, begun = end_of(names[1])
    assert (status, begun) == ("FAILED", stopped)
    killed = committed_steps(s3_url)[-1]

    run_until(names[2], never)
    status, output, begun = end_of(names[2])
    assert status == "SUCCEEDED", output
    assert begun >= killed
    (trained,) = map(int, re.findall(r"trained (\d+) steps, loss", output))
    assert committed_steps(s3_url)[-1] == trained == 6 * 1250
    snapshot = s3_url.client.get_object(
        Bucket=s3_url.bucket, Key=f"{s3_url.prefix}/job-example/checkpoint_manager_snapshot.json"
    )
    latest = json.loads(snapshot["Body"].read())["latest_checkpoint_result"]["checkpoint_dir_name"]
    assert f"step-{trained:010d}-" in latest


def never():
    """Wait for the job's own end."""
    return False
