"""A run to report on, by real processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runtime import jobs
from tests.runtime.harness import Generation, LocalCluster, wait_until


def _at_once() -> None:
    """Wait for nothing."""


# A failure every minute or two, as settings say it: checkpoints then come every few seconds.
_FREQUENT = {"gpu_days_per_failure": 0.002, "keep_last": 3}


def make_real_run(
    folder: Path,
    *,
    num_commits: int = 2,
    is_long: bool = False,
    width: int = 2_000,
    uploads_bytes_per_s: tuple[float, float] = (4e6, 1e6),
    before_kill: Callable[[], None] = _at_once,
    before_start: Callable[[], None] = _at_once,
    **settings: Any,
) -> None:
    """Train for real: killed workers, a resize from 2 workers to 1, a killed job, and another on 2 workers.

    Args:
        folder: The run's folder, as Ray Train would name it.
        num_commits: Checkpoints to wait for before each of these.
        is_long: Five generations instead of three: each job has a restart more.
        width: Of the model; the state takes 108 bytes a unit.
        uploads_bytes_per_s: Upload limit of the first job, and of the second.
        before_kill: Called when enough is committed, before workers are killed.
        before_start: Called after that: stands for the time that Ray takes to restart.
        settings: Of the run, where they are to be others.
    """
    url = str(folder / "raycheck")
    settings = {**_FREQUENT, **settings}
    config = {"steps": 100_000_000, "step_s": 0.01, "width": width}
    stop_file = folder.parent / f"{folder.name}.stop"
    first = LocalCluster(url, upload_bytes_per_s=uploads_bytes_per_s[0], **settings)
    try:
        group = first.start(jobs.train, config, world_size=2)
        for restart in (_start, _resize) if is_long else (_resize,):
            _await_commits(first, num_commits)
            before_kill()
            group.kill(1)
            group.kill_all()
            before_start()
            group = restart(first, config, 2 if restart is _start else 1)
        _await_commits(first, num_commits)
        before_kill()
    finally:
        first.close()  # the whole job: its workers and agents by SIGKILL
    config["stop_file"] = str(stop_file)
    second = LocalCluster(url, upload_bytes_per_s=uploads_bytes_per_s[1], **settings)
    try:
        if is_long:
            group = second.start(jobs.train, config, world_size=1)
            _await_commits(second, num_commits)
            group.kill_all()
            before_start()
            group = _resize(second, config, 2)
        else:
            group = second.start(jobs.train, config, world_size=2)
        _await_commits(second, num_commits)
        stop_file.touch()
        group.results()
    finally:
        second.close()


def _start(cluster: LocalCluster, config: dict[str, Any], world_size: int) -> Generation:
    return cluster.start(jobs.train, config, world_size=world_size)


def _await_commits(cluster: LocalCluster, more: int) -> None:
    """Wait until this many more checkpoints are committed, each for a minute at most."""
    for count in range(1, more + 1):
        before = cluster.status()["num_checkpoints"]
        wait_until(lambda before=before: cluster.status()["num_checkpoints"] > before, f"checkpoint {count}")


def _resize(cluster: LocalCluster, config: dict[str, Any], world_size: int) -> Generation:
    """Start the next generation as Ray Train's resize does: nothing has failed."""
    coordinator = cluster.coordinator
    begin = coordinator.begin_generation
    coordinator.begin_generation = functools.partial(begin, failure=None)
    try:
        return cluster.start(jobs.train, config, world_size=world_size)
    finally:
        coordinator.begin_generation = begin
