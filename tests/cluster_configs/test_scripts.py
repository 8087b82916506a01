"""The scripts in ``cluster_configs/``, run."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import os
import random
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "cluster_configs"

WRITE_AND_LIST = """
import botocore.session
client = botocore.session.Session().create_client("s3")
client.put_object(Bucket="runs", Key="lab/one", Body=b"1")
print([each["Key"] for each in client.list_objects_v2(Bucket="runs")["Contents"]])
"""


def server_ports(first: int) -> list[int]:
    """What ``lab_s3.sh`` uses from ``S3_PORT`` on."""
    return [*range(first, first + 5), *range(first + 10_000, first + 10_005)]


def is_used(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a first port; with the others it is below those that the system hands out by itself."""
    while True:
        first = random.SystemRandom().randrange(22_000, 22_700)
        if not any(is_used(port) for port in server_ports(first)):
            return first


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash(path):
    result = run("bash", "-n", path)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_lab_store_lives_as_long_as_its_command():
    """The command finds endpoint, credentials and bucket; afterwards nothing is left, and its exit status stands."""
    code = f"{WRITE_AND_LIST}\nraise SystemExit(7)"
    port = free_port()
    result = run(FOLDER / "lab_s3.sh", sys.executable, "-c", code, S3_PORT=str(port), AWS_PROFILE="other")
    assert (result.returncode, result.stdout) == (7, "['lab/one']\n"), result.stderr
    assert f"http://127.0.0.1:{port}" in result.stderr
    for each in server_ports(port):
        assert not is_used(each)
        assert not list(Path("/tmp").glob(f"seaweedfs-*-{each}.sock"))


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run(FOLDER / "lab_s3.sh", "true", S3_PORT=port)
    assert result.returncode == 1
    assert f"port {port} is in use; set S3_PORT" in result.stderr


def test_the_server_knows_the_flags_in_the_deployment():
    """An unknown flag would end the container at once."""
    deployment = next(
        each
        for each in yaml.safe_load_all((FOLDER / "lab_s3.yaml").read_text())
        if each["kind"] == "Deployment"
    )
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    weed = Path(sysconfig.get_path("scripts")) / "weed"
    known = run(weed, "mini", "-h")
    assert ":" in container["image"]
    assert not container["image"].endswith(":latest")
    flags = container["args"][container["args"].index("mini") + 1 :]
    assert len(flags) > 5
    for flag in flags:
        assert f"\n  {flag.partition('=')[0]}" in known.stdout + known.stderr, flag


class Metadata(http.server.BaseHTTPRequestHandler):
    """EC2's metadata service: one look finds nothing, the next a notice."""

    looks = 0

    def do_PUT(self):
        self._answer(200, "a-token" if self.path == "/latest/api/token" else "")

    def do_GET(self):
        type(self).looks += 1
        if self.headers["X-aws-ec2-metadata-token"] != "a-token":
            self._answer(401, "")
        elif self.looks == 1:
            self._answer(404, "")
        else:
            end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=120)
            self._answer(200, f'{{"action": "terminate", "time": "{end:%Y-%m-%dT%H:%M:%SZ}"}}')

    def _answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        """Quietly."""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_spot_notice_drains_the_node(tmp_path):
    """The second look finds the notice; Ray is told once, with the time that is left less a margin."""
    told = tmp_path / "told"
    stand_in = tmp_path / "ray"
    stand_in.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >>{told}\n')
    stand_in.chmod(0o755)
    with serving() as address:
        result = run(
            sys.executable,
            FOLDER / "drain_on_spot_notice.py",
            "--node-id=abc",
            PATH=f"{tmp_path}:{os.environ['PATH']}",
            INSTANCE_METADATA=address,
            EVERY_S="0.1",
        )
    assert result.returncode == 0, result.stderr
    assert Metadata.looks == 2
    command, *options = told.read_text().splitlines()
    found = dict(option.removeprefix("--").split("=", 1) for option in options)
    assert command == "drain-node"
    assert found["reason"] == "DRAIN_NODE_REASON_PREEMPTION"
    assert "terminate" in found["reason-message"]
    assert 0 < int(found["deadline-remaining-seconds"]) <= 110
    assert found["node-id"] == "abc"
