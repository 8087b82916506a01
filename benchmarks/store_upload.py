"""Upload and download of one object: ours against other clients, on a server that discards.

    python benchmarks/store_upload.py [--mib 1024] [--runs 5] [--tls]

The server runs in its own process on loopback, so what is compared is the
client: MB/s, and CPU seconds of this process per GB. All clients take turns, so
that a disturbance of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pyarrow.fs
import s3fs

from raycheck.core.sums import ChunkSums
from raycheck.store.checksum import checksum
from raycheck.store.download import download
from raycheck.store.objects import Store
from raycheck.store.spans import Read
from raycheck.store.upload import upload

MIB = 1 << 20
CHUNK_BYTES = 8 * MIB
PIECE_BYTES = 16 * MIB
BUCKET = "bench"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=1024)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--tls", action="store_true")
    given = arguments.parse_args()
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        certificate = make_certificate(stack) if given.tls else None
        endpoint = start_server(stack, certificate)
        source = make_source(given.mib * MIB)
        bench(endpoint, certificate, source, given.mib * MIB, given.runs)


def bench(endpoint: str, certificate: str | None, source: int, size_bytes: int, runs: int) -> None:
    options = {"key": "key", "secret": "secret", "endpoint_url": endpoint}
    options["client_kwargs"] = {"verify": certificate, "region_name": "us-east-1"} if certificate else {}
    store = Store(f"s3://{BUCKET}/run", options)
    peers = {
        "raycheck upload": lambda: send(store, source, size_bytes),
        "s3fs put_file": lambda: s3fs_put_file(options, source),
        "s3fs open, write": lambda: s3fs_write(options, source, size_bytes),
        "pyarrow stream": lambda: pyarrow_write(endpoint, certificate, source, size_bytes),
        "raycheck download": lambda: fetch(store, size_bytes),
        "s3fs cat_file": lambda: s3fs_cat_file(options, size_bytes),
    }
    send(store, source, size_bytes)
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for run in range(runs + 1):
        for name, peer in peers.items():
            wall_s, cpu_s = measure(peer)
            if run:  # the first one imports, connects and touches memory
                rows[name].append((size_bytes / 1e6 / wall_s, cpu_s / (size_bytes / 1e9)))
    ours = {
        kind: statistics.median(rate for rate, _ in rows[f"raycheck {kind}"])
        for kind in ("upload", "download")
    }
    print(
        f"{size_bytes >> 20} MiB, median of {runs}, {'TLS' if certificate else 'plain HTTP'}, "
        f"{os.cpu_count()} cores"
    )
    print(f"{'client':<20}{'MB/s':>8}{'(min-max)':>14}{'CPU s/GB':>10}{'ours : it':>11}")
    for name, results in rows.items():
        rates, cpu = [rate for rate, _ in results], statistics.median(cost for _, cost in results)
        kind = "download" if "download" in name or "cat" in name else "upload"
        rate = statistics.median(rates)
        span = f"{min(rates):.0f}-{max(rates):.0f}"
        print(f"{name:<20}{rate:>8.0f}{span:>14}{cpu:>10.2f}{ours[kind] / rate:>10.1f}x")


def measure(peer) -> tuple[float, float]:
    cpu_s, started_s = cpu_seconds(), time.monotonic()
    peer()
    return time.monotonic() - started_s, cpu_seconds() - cpu_s


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def send(store: Store, source: int, size_bytes: int) -> None:
    upload(
        store,
        "ours",
        source,
        size_bytes=size_bytes,
        chunk_bytes=CHUNK_BYTES,
        parallel_parts=4,
        cancelled=threading.Event(),
    )


def s3fs_put_file(options: dict, source: int) -> None:
    made = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    made.put_file(f"/proc/self/fd/{source}", f"{BUCKET}/put")


def s3fs_write(options: dict, source: int, size_bytes: int) -> None:
    made = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    with made.open(f"{BUCKET}/write", "wb") as file:
        for offset in range(0, size_bytes, PIECE_BYTES):
            file.write(os.pread(source, PIECE_BYTES, offset))


def pyarrow_write(endpoint: str, certificate: str | None, source: int, size_bytes: int) -> None:
    scheme, address = endpoint.split("://")
    made = pyarrow.fs.S3FileSystem(
        access_key="key",
        secret_key="secret",
        endpoint_override=address,
        scheme=scheme,
        region="us-east-1",
        **({"tls_ca_file_path": certificate} if certificate else {}),
    )
    with made.open_output_stream(f"{BUCKET}/arrow") as file:
        for offset in range(0, size_bytes, PIECE_BYTES):
            file.write(os.pread(source, PIECE_BYTES, offset))


def fetch(store: Store, size_bytes: int) -> None:
    destination = os.memfd_create("benchmark-destination")
    # The server serves zeros.
    zeros = [checksum(bytes(CHUNK_BYTES))] * (size_bytes // CHUNK_BYTES)
    sums = ChunkSums(CHUNK_BYTES, size_bytes, tuple(zeros))
    reads = [Read(0, size_bytes, 0)]
    download(store, "ours", reads, destination, sums=sums, parallel=4, cancelled=threading.Event())
    os.close(destination)


def s3fs_cat_file(options: dict, size_bytes: int) -> None:
    made = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    destination = os.memfd_create("benchmark-destination")
    for offset in range(0, size_bytes, PIECE_BYTES):
        os.pwrite(
            destination, made.cat_file(f"{BUCKET}/run/ours", start=offset, end=offset + PIECE_BYTES), offset
        )
    os.close(destination)


def make_source(size_bytes: int) -> int:
    descriptor = os.memfd_create("benchmark-source")
    block = os.urandom(MIB)
    for offset in range(0, size_bytes, MIB):
        os.pwrite(descriptor, block, offset)
    return descriptor


def start_server(stack: contextlib.ExitStack, certificate: str | None) -> str:
    command = [sys.executable, Path(__file__).with_name("discard_s3.py")]
    server = subprocess.Popen(
        command + ([certificate] if certificate else []),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(server.wait)
    stack.callback(server.stdin.close)
    return f"{'https' if certificate else 'http'}://127.0.0.1:{int(server.stdout.readline())}"


def make_certificate(stack: contextlib.ExitStack) -> str:
    if not shutil.which("openssl"):
        sys.exit("--tls needs the openssl command")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    both = folder / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    return str(both)


if __name__ == "__main__":
    main()
