"""One Ray head node for all tests that need Ray."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
import ray


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass(frozen=True)
class Head:
    """A head node: where drivers connect, and where jobs are submitted."""

    address: str
    dashboard_url: str | None
    """None: this installation has no job server."""


def _has_job_server() -> bool:
    return all(map(importlib.util.find_spec, ("aiohttp_cors", "opencensus", "prometheus_client")))


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="session")
def ray_node(s3_server, request):
    """Start a head node of our own; end it by its process id."""
    port, dashboard_port = _free_port(), _free_port()
    # With its dashboard, a dozen processes more, only for those that submit jobs.
    has_job_server = _has_job_server() and any(
        "job_server" in item.fixturenames for item in request.session.items
    )
    folder = tempfile.mkdtemp(prefix="raycheck-ray-")
    environment = {
        **os.environ,
        # A token left by another Ray on this machine would be asked for.
        "RAY_AUTH_MODE": "disabled",
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
        "AWS_EC2_METADATA_DISABLED": "true",
        # A submitted job says "python".
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # As docs/ray_train.md advises.
        "RAY_JOB_STOP_SIGNAL": "SIGINT",
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        # Ray's 15 leaves its workers with next to nothing on a machine that is shared.
        "RAY_worker_niceness": "0",
        # Its controller looks at the workers every two seconds, and ends a run no sooner.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    }
    os.environ["RAY_AUTH_MODE"] = "disabled"
    log = Path(folder, "head.log").open("wb")  # noqa: SIM115  the head node's, as long as it lives
    head = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
            "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=8", "--num-gpus=0",
            f"--include-dashboard={str(has_job_server).lower()}", "--dashboard-host=127.0.0.1",
            f"--dashboard-port={dashboard_port}", "--disable-usage-stats", "--object-store-memory=200000000",
            f"--temp-dir={folder}",
        ],
        env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    end_s = time.monotonic() + 120
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert head.poll() is None, Path(folder, "head.log").read_text()
        assert time.monotonic() < end_s, "Ray did not start"
        time.sleep(0.05)
    yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}" if has_job_server else None)
    family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=20)
    log.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_head(ray_node):
    """The address of the head node."""
    return ray_node.address


@pytest.fixture
def job_server(ray_node):
    """Where jobs are submitted."""
    if ray_node.dashboard_url is None:
        pytest.skip("ray[default], which has the job server, is not installed")
    end_s = time.monotonic() + 120
    # It comes up some time after the node.
    while not _answers(f"{ray_node.dashboard_url}/api/version"):
        assert time.monotonic() < end_s, "the job server did not start"
        time.sleep(0.05)
    return ray_node.dashboard_url


@pytest.fixture
def connected(ray_head):
    """Connect this process to the head node, as a driver of its own."""
    ray.init(address=ray_head, log_to_driver=False, configure_logging=False)
    yield ray_head
    ray.shutdown()
