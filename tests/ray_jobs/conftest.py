"""One Ray head node for all tests that need Ray."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import ray


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def ray_head(s3_server):
    """Start a head node of our own; end it by its process id."""
    port = _free_port()
    folder = tempfile.mkdtemp(prefix="raycheck-ray-")
    environment = {
        **os.environ,
        # A token left by another Ray on this machine would be asked for.
        "RAY_AUTH_MODE": "disabled",
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    os.environ["RAY_AUTH_MODE"] = "disabled"
    log = Path(folder, "head.log").open("wb")  # noqa: SIM115  the head node's, as long as it lives
    head = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
            "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=8", "--num-gpus=0",
            "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=200000000",
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
    yield f"127.0.0.1:{port}"
    family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=20)
    log.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def connected(ray_head):
    """Connect this process to the head node, as a driver of its own."""
    ray.init(address=ray_head, log_to_driver=False, configure_logging=False)
    yield ray_head
    ray.shutdown()
