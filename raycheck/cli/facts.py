"""Gathers the facts that ``raycheck doctor`` judges, on the machine where it is called."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import resource
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raycheck.cli.health import MachineFacts, StorageFacts
from raycheck.errors import RaycheckError
from raycheck.state.memory import read_node_memory
from raycheck.store.checksum import DEFAULT_CHUNK_BYTES
from raycheck.store.download import download
from raycheck.store.local import PARTIAL_FOLDER
from raycheck.store.objects import PROBE_FOLDER, Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.spans import Read
from raycheck.store.upload import upload

_PACKAGES = ("ray", "torch", "pyarrow", "fsspec", "s3fs", "safetensors", "numpy")
_VARIABLES = ("RAY_JOB_STOP_SIGNAL", "RAY_JOB_STOP_WAIT_TIME_S", "RAY_TRAIN_V2_ENABLED")
_QUICK = RetryPolicy(budget_s=8.0)
_PARALLEL = 4
"""As an agent uploads by default."""


def gather(url: str | None, options: Mapping[str, Any], *, probe_bytes: int) -> MachineFacts:
    """Return the facts of this machine. Blocks for storage and for the imports of Ray and torch.

    Args:
        url: The store to try; None: none.
        options: Of its file system.
        probe_bytes: Size of the object that is written and read to measure.
    """
    available_bytes, limit_left_bytes = _memory()
    ray_error, missing_hooks, is_tested_ray = _ray_hooks()
    return MachineFacts(
        host=socket.gethostname(),
        system=platform.system(),
        kernel=platform.release(),
        python=platform.python_version(),
        memfd_error=_memfd_error(),
        passing_error=_passing_error(),
        available_bytes=available_bytes,
        limit_left_bytes=limit_left_bytes,
        locked_bytes=_locked_bytes(),
        has_gpu=Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(),
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        versions={name: version for name in _PACKAGES if (version := _version(name))},
        outdated=_outdated(),
        ray_error=ray_error,
        missing_hooks=missing_hooks,
        is_tested_ray=is_tested_ray,
        storage=None if url is None else try_storage(url, options, probe_bytes=probe_bytes),
    )


def try_storage(url: str, options: Mapping[str, Any], *, probe_bytes: int) -> StorageFacts:
    """Try a store, and measure it with one object, which is deleted. Blocks for storage."""
    try:
        store = Store(url, options, retry=_QUICK)
        started_s = time.monotonic()
        store.probe()
        probe_s = time.monotonic() - started_s
        write_bytes_per_s, read_bytes_per_s = _measure(store, probe_bytes)
    except RaycheckError as error:
        return StorageFacts(url=url, error=str(error))
    return StorageFacts(
        url=store.url,
        is_local=store.location.scheme == "file",
        probe_s=probe_s,
        num_bytes=probe_bytes,
        write_bytes_per_s=write_bytes_per_s,
        read_bytes_per_s=read_bytes_per_s,
    )


def _measure(store: Store, num_bytes: int) -> tuple[float, float]:
    """Return bytes per second of writing and of reading, the way that agents and restores do it."""
    key = f"{PROBE_FOLDER}/{secrets.token_hex(16)}"
    source = os.memfd_create("raycheck-probe", os.MFD_CLOEXEC)
    target = os.memfd_create("raycheck-probe", os.MFD_CLOEXEC)
    never = threading.Event()
    try:
        block = secrets.token_bytes(1 << 20)
        for offset in range(0, num_bytes, len(block)):
            os.pwrite(source, block[: num_bytes - offset], offset)
        started_s = time.monotonic()
        sums = upload(
            store,
            key,
            source,
            size_bytes=num_bytes,
            chunk_bytes=DEFAULT_CHUNK_BYTES,
            parallel_parts=_PARALLEL,
            cancelled=never,
        )
        written_s = time.monotonic()
        reads = [Read(0, num_bytes, 0)]
        download(store, key, reads, target, sums=sums, parallel=_PARALLEL, cancelled=never)
        read_s = time.monotonic()
    finally:
        os.close(source)
        os.close(target)
        store.delete([key])
        if store.location.scheme == "file":
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(store.location.root, PARTIAL_FOLDER))
    return num_bytes / max(written_s - started_s, 1e-6), num_bytes / max(read_s - written_s, 1e-6)


def _memory() -> tuple[int | None, int | None]:
    try:
        memory = read_node_memory()
    except (OSError, ValueError):
        return None, None
    return memory.available_bytes, memory.limit_left_bytes


def _locked_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _memfd_error() -> str:
    try:
        descriptor = os.memfd_create("raycheck-doctor", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        return str(error)
    try:
        os.ftruncate(descriptor, 1 << 20)
        os.pwrite(descriptor, b"x", (1 << 20) - 1)
    except OSError as error:
        return str(error)
    finally:
        os.close(descriptor)
    return ""


def _passing_error() -> str:
    """Try what a worker and its agent do: hand over a descriptor through a Unix socket."""
    try:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with left, right, open(os.devnull, "rb") as file:
            socket.send_fds(left, [b"x"], [file.fileno()])
            _, descriptors, _, _ = socket.recv_fds(right, 1, 1)
            for descriptor in descriptors:
                os.close(descriptor)
    except OSError as error:
        return str(error)
    return "" if descriptors else "the descriptor did not arrive"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _outdated() -> dict[str, str]:
    """Return what of raycheck's own requirements is not met."""
    # Ray needs this package itself; without Ray there is nothing to compare with.
    try:
        requirements = importlib.import_module("packaging.requirements")
        listed = importlib.metadata.requires("raycheck") or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return {}
    unmet = {}
    for text in listed:
        requirement = requirements.Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet[requirement.name] = f"{requirement.specifier} ({version or 'missing'})"
    return unmet


def _ray_hooks() -> tuple[str, tuple[str, ...], bool]:
    """Return why Ray Train cannot be used, hooks that it lacks, and whether this version was tested."""
    try:
        compat = importlib.import_module("raycheck.runtime.compat")
        callback = importlib.import_module("raycheck.runtime.callback").AutoCheckpoint
    # Another version may fail in any way while it is imported.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"[:300], (), False
    used = [name for name in vars(callback) if name.startswith(("before_", "after_"))]
    missing = tuple(name for name in used if not any(hasattr(base, name) for base in callback.__mro__[1:]))
    version = _version("ray") or ""
    return "", missing, any(version.startswith(f"{tested}.") for tested in compat.TESTED_RAY_VERSIONS)
