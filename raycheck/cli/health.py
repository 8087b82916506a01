"""What the facts about a machine mean for raycheck: pure judgement for ``raycheck doctor``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from raycheck.cli.units import bytes_text
from raycheck.core.interval_text import seconds_text
from raycheck.state.memory import RESERVED_FRACTION

Status = Literal["ok", "warning", "problem"]

_STOP_WAIT_S = 3.0
"""How long "ray job stop" waits by default before it kills."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: str
    status: Status
    text: str
    advice: str = ""
    """What to do; "" where nothing is to be done."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """What came of trying a store."""

    url: str
    error: str = ""
    is_local: bool = False
    probe_s: float = 0.0
    num_bytes: int = 0
    """Of the object that was written and read to measure."""

    write_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What was found on one machine."""

    host: str
    system: str
    """Such as "Linux"."""

    kernel: str
    python: str
    memfd_error: str
    passing_error: str
    """Why a descriptor could not be handed to another process; "" if it could."""

    available_bytes: int | None
    limit_left_bytes: int | None
    """What the tightest memory limit still allows; None without one."""

    locked_bytes: int | None
    """How much memory a process may lock; None: any."""

    has_gpu: bool
    environment: Mapping[str, str]
    """Ray's settings among the environment variables."""

    versions: Mapping[str, str]
    outdated: Mapping[str, str]
    """By package: what is required of it, where it is missing or too old."""

    ray_error: str
    """Why Ray Train's hooks could not be imported; "" if they could."""

    missing_hooks: tuple[str, ...]
    is_tested_ray: bool
    storage: StorageFacts | None


def judge(facts: MachineFacts, *, state_bytes: float) -> list[Finding]:
    """Return what the facts mean, most important first.

    Args:
        facts: Of one machine.
        state_bytes: What the workers of one node write per checkpoint.
    """
    findings = [] if facts.storage is None else _storage(facts.storage, state_bytes)
    findings += [
        _shared_memory(facts),
        _memory(facts, state_bytes),
        _locked_memory(facts),
        _ray(facts),
        _packages(facts),
        *_job_stop(facts.environment, facts.storage, state_bytes),
    ]
    return findings


def _storage(storage: StorageFacts, state_bytes: float) -> list[Finding]:
    if storage.error:
        return [
            Finding(
                "storage", "problem", storage.error, "a run refuses to start until this store can be used"
            )
        ]
    answered = seconds_text(storage.probe_s)
    upload_s = state_bytes / storage.write_bytes_per_s
    source = " from the page cache" if storage.is_local else ""
    return [
        Finding(
            "storage",
            "ok",
            f"{storage.url}: an object was written, listed at once, read back and deleted in {answered}",
        ),
        Finding(
            "bandwidth",
            "ok",
            f"writes {bytes_text(storage.write_bytes_per_s)}/s, reads "
            f"{bytes_text(storage.read_bytes_per_s)}/s{source} (one object of {bytes_text(storage.num_bytes)})",
        ),
        Finding(
            "grace time",
            "ok",
            f"{bytes_text(state_bytes)} of state take {seconds_text(upload_s)} to upload from here: a node that is "
            "taken away sooner after its notice (grace period, drain deadline) cannot save first",
        ),
    ]


def _shared_memory(facts: MachineFacts) -> Finding:
    if facts.system != "Linux":
        return Finding("snapshots", "problem", f"{facts.system} has no memfd_create", "train on Linux")
    if facts.memfd_error:
        text = f"no memory file can be made: {facts.memfd_error}"
        return Finding("snapshots", "problem", text, "the sandbox or seccomp profile must allow memfd_create")
    if facts.passing_error:
        text = f"a memory file cannot be handed to another process: {facts.passing_error}"
        return Finding("snapshots", "problem", text, "the sandbox must allow SCM_RIGHTS over Unix sockets")
    return Finding("snapshots", "ok", "memory files can be made and handed to the agent")


def _memory(facts: MachineFacts, state_bytes: float) -> Finding:
    if facts.available_bytes is None:
        return Finding("memory", "warning", "it cannot be told how much is free", "is /proc mounted?")
    limit_bytes = facts.limit_left_bytes
    free_bytes = facts.available_bytes if limit_bytes is None else min(facts.available_bytes, limit_bytes)
    by = "" if limit_bytes is None or limit_bytes > facts.available_bytes else " below the memory limit"
    room_bytes = free_bytes * (1 - RESERVED_FRACTION)
    text = f"{bytes_text(free_bytes)} are free{by}; snapshots may take {bytes_text(room_bytes)} of them"
    if room_bytes < state_bytes:
        return Finding(
            "memory",
            "warning",
            f"{text}, a state of {bytes_text(state_bytes)} does not fit",
            "raise the container's memory limit by the size of the node's state, or see --bytes",
        )
    return Finding("memory", "ok", text)


def _locked_memory(facts: MachineFacts) -> Finding:
    if facts.locked_bytes is None:
        return Finding("locked memory", "ok", "any amount may be locked")
    text = f"{bytes_text(facts.locked_bytes)} may be locked (ulimit -l)"
    if not facts.has_gpu:
        return Finding("locked memory", "ok", f"{text}; there is no GPU here that would copy into it")
    return Finding(
        "locked memory",
        "warning",
        f"{text}; a driver that keeps to it cannot pin snapshots, and copies from the GPU are then slower",
        "raise the limit (memlock) to the size of the node's state; raycheck says so if pinning fails",
    )


def _ray(facts: MachineFacts) -> Finding:
    version = facts.versions.get("ray", "none")
    if facts.environment.get("RAY_TRAIN_V2_ENABLED", "1").lower() in ("0", "false"):
        text = "RAY_TRAIN_V2_ENABLED switches off the Ray Train that raycheck works with"
        return Finding("ray", "problem", text, "unset it")
    if facts.ray_error:
        text = f"Ray {version} has not the hooks that raycheck needs: {facts.ray_error}"
        return Finding("ray", "problem", text, "install a version of ray[train] that raycheck supports")
    if facts.missing_hooks:
        missing = ", ".join(facts.missing_hooks)
        text = f"Ray {version} does not call {missing}"
        return Finding("ray", "problem", text, "install a version of ray[train] that raycheck supports")
    if not facts.is_tested_ray:
        text = f"Ray {version} has all hooks that raycheck needs, but has not been tested with it"
        return Finding("ray", "warning", text, "try a kill and a resume before you rely on it")
    return Finding("ray", "ok", f"Ray {version} has all hooks that raycheck needs")


def _packages(facts: MachineFacts) -> Finding:
    if facts.outdated:
        listed = ", ".join(f"{name} {required}" for name, required in facts.outdated.items())
        return Finding("packages", "problem", f"missing or too old: {listed}", "install raycheck again")
    shown = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if name != "ray")
    return Finding("packages", "ok", f"Python {facts.python}, Linux {facts.kernel}, {shown}")


def _job_stop(
    environment: Mapping[str, str], storage: StorageFacts | None, state_bytes: float
) -> list[Finding]:
    signal = environment.get("RAY_JOB_STOP_SIGNAL", "SIGTERM")
    if signal != "SIGINT":
        return [
            Finding(
                "job stop",
                "warning",
                f'"ray job stop" sends {signal}, and the job ends without a last checkpoint',
                'set RAY_JOB_STOP_SIGNAL=SIGINT where "ray start" runs, or in the job\'s runtime_env',
            )
        ]
    try:
        wait_s = float(environment.get("RAY_JOB_STOP_WAIT_TIME_S", _STOP_WAIT_S))
    except ValueError:
        wait_s = _STOP_WAIT_S
    text = f'"ray job stop" sends SIGINT and kills after {seconds_text(wait_s)}'
    if storage is None or storage.error:
        return [Finding("job stop", "ok", text)]
    upload_s = state_bytes / storage.write_bytes_per_s
    if upload_s <= wait_s:
        return [Finding("job stop", "ok", text)]
    return [
        Finding(
            "job stop",
            "warning",
            f"{text}, {bytes_text(state_bytes)} of state take {seconds_text(upload_s)} to upload",
            f"set RAY_JOB_STOP_WAIT_TIME_S={max(int(2 * upload_s), 30)}",
        )
    ]
