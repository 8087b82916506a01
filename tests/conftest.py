"""What tests of several layers share: an S3 server of our own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import os
import random
import socket
import subprocess
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import hypothesis
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from xdist.scheduler import LoadScopeScheduling

# No test depends on speed: machines are shared.
hypothesis.settings.register_profile(
    "raycheck", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("raycheck")

_START_S = 30.0


class _ByFile(LoadScopeScheduling):
    """Gives each process of ``pytest -n`` whole files, and all of Ray's tests to one: they share a head node."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "ray" if "ray_jobs/" in path else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _ByFile:
    """Say how tests are dealt."""
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest group, so that the others fill the time beside it."""
    items.sort(key=lambda item: item.path.parent.name != "ray_jobs")


_GRPC_OFFSET = 10_000  # each SeaweedFS service also listens this far above its port


@dataclasses.dataclass(frozen=True)
class S3Server:
    """A running server, and a client of it that shares no code with raycheck."""

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str
    pid: int

    @functools.cached_property
    def client(self):
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}),
        )

    @property
    def options(self) -> dict:
        """Options of s3fs."""
        return {"key": self.access_key, "secret": self.secret_key, "endpoint_url": self.endpoint}


@dataclasses.dataclass(frozen=True)
class S3Place:
    """A fresh prefix in the bucket that all tests share."""

    url: str
    options: dict
    bucket: str
    prefix: str
    client: object


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server (SeaweedFS) for the whole session, on free ports of 127.0.0.1.

    Ports are taken from below the range that the system hands out by itself, so
    that no other program gets one between our look and the server's start; a
    start that fails all the same is tried again with others.
    """
    with tempfile.TemporaryDirectory(prefix="raycheck-s3-") as folder:
        sockets_before = _sockets()
        for attempt in range(3):
            data = Path(folder) / str(attempt)
            data.mkdir()
            server, process = _start(data)
            if server:
                break
        else:
            pytest.fail(f"SeaweedFS did not start:\n{_log_tail(data)}")
        try:
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for path in _sockets() - sockets_before:
                # Another session's server may have made one too: only what nobody listens on.
                if not _answers_unix(path):
                    with contextlib.suppress(OSError):
                        os.unlink(path)


@pytest.fixture
def s3_url(s3_server) -> S3Place:
    """A URL with a fresh prefix, and the fsspec options for it; a new bucket would take 0.5 s each."""
    prefix = f"runs-{uuid.uuid4().hex[:12]}"
    url = f"s3://{s3_server.bucket}/{prefix}"
    return S3Place(url, s3_server.options, s3_server.bucket, prefix, s3_server.client)


def _start(data: Path) -> tuple[S3Server | None, subprocess.Popen | None]:
    s3, master, volume, filer, admin = _free_ports(5)
    key, secret = uuid.uuid4().hex, uuid.uuid4().hex
    flags = {
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3.port": s3,
        "master.port": master,
        "volume.port": volume,
        "filer.port": filer,
        "admin.port": admin,
        "admin.ui": "false",
        "webdav": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.telemetry": "false",
    }
    binary = Path(sysconfig.get_path("scripts")) / "weed"
    with open(data / "log", "wb") as log:
        process = subprocess.Popen(
            [binary, "-logtostderr=true", "mini", *(f"-{name}={value}" for name, value in flags.items())],
            env={**os.environ, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret},
            cwd=data,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    server = S3Server(f"http://127.0.0.1:{s3}", key, secret, "raycheck-tests", process.pid)
    if _wait_until_ready(server, process):
        return server, process
    process.kill()
    process.wait()
    return None, None


def _wait_until_ready(server: S3Server, process: subprocess.Popen) -> bool:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            server.client.create_bucket(Bucket=server.bucket)
            server.client.put_object(Bucket=server.bucket, Key="ready", Body=b"yes")
        except (BotoCoreError, ClientError):
            time.sleep(0.1)  # between two looks at a server that is starting
        else:
            return True
    return False


def _free_ports(count: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_500, 20_000)
        if port not in ports and _is_free(port) and _is_free(port + _GRPC_OFFSET):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _sockets() -> set[str]:
    return set(glob.glob(os.path.join(tempfile.gettempdir(), "seaweedfs-*.sock")))


def _answers_unix(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _log_tail(data: Path) -> str:
    return (data / "log").read_text(errors="replace")[-3000:]
