"""The only file that touches Ray Train's internals.

Tested with Ray 2.60. Hooks are looked up when they are used, so that a version
without one degrades with a message instead of an AttributeError.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pyarrow.fs
import ray
import ray.train
from ray.train.v2._internal.exceptions import (
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.callback import (
    ControllerCallback,
    WorkerCallback,
    WorkerGroupCallback,
)
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.controller.state import ResizingState, RunningState
from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils
from ray.train.v2._internal.execution.training_report import _TrainingReport

from raycheck.core.failure_rate import FailureKind

logger = logging.getLogger("raycheck")

TESTED_RAY_VERSIONS = ("2.60",)

__all__ = [
    "ControllerCallback",
    "RayCheckpoints",
    "WorkerCallback",
    "WorkerGroupCallback",
    "after_train_function",
    "draining_nodes",
    "failure_kind",
    "is_local_run",
    "is_replica_group_run",
    "is_resizing",
    "node_ids",
    "rank_and_sizes",
    "run_id",
    "run_path",
    "run_was_named",
    "stop_wait_s",
]


def rank_and_sizes() -> tuple[int, int, int]:
    """Return this worker's rank, the world size, and the number of workers on this node."""
    context = ray.train.get_context()
    return context.get_world_rank(), context.get_world_size(), context.get_local_world_size()


def is_local_run() -> bool:
    """Whether this is a train function in Ray's local mode (``num_workers=0``), where no hooks run."""
    try:
        return not get_train_fn_utils().is_distributed()
    except RuntimeError:
        return False


def node_ids(workers: list[Any]) -> list[str]:
    """Return the node of each worker of a group, by rank."""
    return [worker.metadata.node_id for worker in workers]


def run_path(train_run_context: Any) -> tuple[str, str, Any]:
    """Return a run's storage path, its name, and the file system that the user gave, or None."""
    config = train_run_context.run_config
    path = str(config.storage_path)
    return path, str(config.name), config.storage_filesystem


def run_id(train_run_context: Any) -> str:
    """Return the id of this start of a run, as Ray Train's metrics have it."""
    return str(getattr(train_run_context, "run_id", ""))


def run_was_named(train_run_context: Any) -> bool:
    """Whether the user gave the run a name; without one each start is another run."""
    return not str(train_run_context.run_config.name).startswith("ray_train_run-")


def failure_kind(controller_state: Any) -> FailureKind | None:
    """Return what kind of failure a state of the controller stands for; None: for none.

    Workers that lost a peer fail with errors of their own, so one death outweighs them.
    """
    error = getattr(controller_state, "training_failed_error", None)
    if error is None:
        return None
    if type(error).__name__ == "PreemptionError":
        return "preempted"
    failures = getattr(error, "worker_failures", {}).values()
    if any(isinstance(f, WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError) for f in failures):
        return "worker"
    return "exception" if failures else "worker"


def is_replica_group_run(train_run_context: Any) -> bool:
    """Whether survivors stay when a worker is replaced, as with TorchFT."""
    backend_config = getattr(train_run_context, "backend_config", None)
    backend_cls = getattr(backend_config, "backend_cls", None)
    return bool(getattr(backend_cls, "has_replica_groups", False))


def draining_nodes() -> dict[str, int]:
    """Return the nodes that Ray drains, with deadlines in milliseconds since 1970; 0: none was given.

    Blocks for the cluster's head.
    """
    return dict(ray._private.state.state.get_draining_nodes())


def is_resizing(previous_state: Any, current_state: Any) -> bool:
    """Whether a running worker group is about to be stopped for another size."""
    return isinstance(previous_state, RunningState) and isinstance(current_state, ResizingState)


def stop_wait_s() -> float:
    """Return how long ``ray job stop`` waits for a job before it kills it, seconds."""
    try:
        return float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "3"))
    except ValueError:
        return 3.0


class RayCheckpoints:
    """Ray Train's own list of checkpoints, in the controller. Used in its event loop alone."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        self._context = manager._storage_context

    @classmethod
    def of(cls, worker_group: Any) -> RayCheckpoints | None:
        """Return the list of the controller that started this group; None if this version of Ray hides it."""
        callbacks = getattr(worker_group, "_callbacks", ())
        manager = next((c for c in callbacks if isinstance(c, CheckpointManager)), None)
        return None if manager is None else cls(manager)

    @property
    def num_to_keep(self) -> int | None:
        """How many Ray Train keeps; None: all."""
        return self._manager._checkpoint_config.num_to_keep

    def names(self) -> list[str]:
        """Return what it holds, oldest or worst first: paths below the run's folder, others whole."""
        folder = self._context.experiment_fs_path + "/"
        held = (result.checkpoint for result in self._manager._checkpoint_results)
        return [checkpoint.path.removeprefix(folder) for checkpoint in held if checkpoint is not None]

    def exists(self, path: str) -> bool:
        """Whether there is something at a path below the run's folder. Blocks for storage."""
        whole = self._context.build_checkpoint_path_from_name(path)
        info = self._context.storage_filesystem.get_file_info(whole)
        return bool(info.type != pyarrow.fs.FileType.NotFound)

    def register(self, path: str, metrics: dict[str, Any]) -> None:
        """Add a checkpoint, as if the workers had reported it, but without them.

        Blocks for storage: Ray Train writes its list, and deletes what it does
        not keep. The workers' count of their own reports stays what it is.
        """
        manager = self._manager
        checkpoint = ray.train.Checkpoint(
            self._context.build_checkpoint_path_from_name(path), self._context.storage_filesystem
        )
        num_reports = manager._current_report_index
        try:
            manager.register_checkpoint(_TrainingReport(checkpoint, metrics, validation=False))
        finally:
            # get_all_reported_checkpoints() waits until it is the worker's own count.
            manager._current_report_index = num_reports


def after_train_function(*, on_return: Callable[[], None], on_error: Callable[[], None]) -> None:
    """Have a function called in this worker when its train function ends, in the same thread."""
    runner = get_train_context().execution_context.training_thread_runner
    run = getattr(runner, "run", None)
    if run is None:
        logger.warning(
            "this version of Ray (%s) has no hook at the end of the train function: call "
            "Checkpointer.close() at its end, or the last checkpoint is not taken",
            ray.__version__,
        )
        return

    def run_and_close(target: Callable[[], Any]) -> None:
        def wrapped() -> Any:
            try:
                result = target()
            except BaseException:
                on_error()
                raise
            on_return()
            return result

        wrapped.__name__ = getattr(target, "__name__", "train_fn")
        run(wrapped)

    runner.run = run_and_close  # type: ignore[method-assign]
