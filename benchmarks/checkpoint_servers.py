"""S3 servers of a benchmark's own."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec
from checkpoint_peers import Place

SERVERS: set[int] = set()
"""Their process ids, which belong to no peer."""


def start_s3(stack: contextlib.ExitStack, kind: str, folder: Path) -> Place:
    """Start a server of our own; its CPU time and memory are not those of a peer."""
    port, secret = free_port(), {"key": "benchmark", "secret": "benchmark-secret"}
    if kind == "discard":
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("discard_s3.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        port = int(server.stdout.readline())
    else:
        server = start_seaweedfs(port, folder / "s3", **secret)
        # It leaves its socket behind.
        socket_path = Path(tempfile.gettempdir(), f"seaweedfs-s3-{port}.sock")
        stack.callback(socket_path.unlink, missing_ok=True)
    SERVERS.add(server.pid)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    options = {
        **secret,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    if kind == "seaweedfs":
        await_bucket(options)
    return Place(folder, "s3://benchmark/run", options, keeps=kind != "discard")


def start_seaweedfs(port: int, folder: Path, *, key: str, secret: str) -> subprocess.Popen:
    folder.mkdir()
    flags = {"dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.port": port, "webdav": "false"}
    flags |= {"admin.ui": "false", "s3.port.iceberg": 0, "s3.port.lance": 0, "master.telemetry": "false"}
    for name in ("master", "volume", "filer", "admin"):
        flags[f"{name}.port"] = free_port()
    return subprocess.Popen(
        [
            Path(sys.executable).with_name("weed"),
            "-logtostderr=true",
            "mini",
            *(f"-{name}={value}" for name, value in flags.items()),
        ],
        env={**os.environ, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def await_bucket(options: dict) -> None:
    end_s = time.monotonic() + 60
    while True:
        try:
            fsspec.filesystem("s3", **options, skip_instance_cache=True).makedir("benchmark")
        except OSError:
            assert time.monotonic() < end_s, "the server did not start"
            time.sleep(0.2)  # between two looks
        else:
            return


def free_port() -> int:
    # SeaweedFS listens 10,000 above each port as well.
    while True:
        port = random.SystemRandom().randrange(10_500, 20_000)
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            return port
