"""The only file that touches Ray Train's internals.

Its callbacks are needed: a Ray without them is refused. Everything else is
looked up when it is used, and a version that lacks it loses what hangs on it,
with one warning that says so.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import pyarrow.fs
import ray
import ray.train

from raycheck.core.failure_rate import FailureKind

try:
    from ray.train.v2._internal.execution.callback import (
        ControllerCallback,
        WorkerCallback,
        WorkerGroupCallback,
    )
except ImportError as error:
    raise ImportError(
        f"Ray {ray.__version__} has not the callbacks of Ray Train that raycheck lives in ({error}); "
        'install a version that it supports: pip install "ray[train]>=2.60"'
    ) from error

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


@functools.cache
def _find(module: str, name: str, otherwise: str) -> Any:
    """Return something of Ray Train's internals; None where this version lacks it.

    Args:
        module: Below the package of the internals.
        name: In that module.
        otherwise: What does not work without it, for the one warning.
    """
    try:
        return getattr(importlib.import_module(f"ray.train.v2._internal.{module}"), name)
    except (ImportError, AttributeError):
        logger.warning("Ray %s has no %s.%s: %s", ray.__version__, module, name, otherwise)
        return None


def rank_and_sizes() -> tuple[int, int, int]:
    """Return this worker's rank, the world size, and the number of workers on this node."""
    context = ray.train.get_context()
    return context.get_world_rank(), context.get_world_size(), context.get_local_world_size()


def is_local_run() -> bool:
    """Whether this is a train function in Ray's local mode (``num_workers=0``), where no hooks run."""
    get_utils = _find(
        "execution.train_fn_utils", "get_train_fn_utils", "Ray's local mode (num_workers=0) is not recognised"
    )
    try:
        return get_utils is not None and not get_utils().is_distributed()
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


_DEATHS = ("WorkerHealthCheckFailedError", "WorkerHealthCheckTimeoutError")


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
    if any(type(failure).__name__ in _DEATHS for failure in failures):
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
    ask = _draining_nodes_call()
    return dict(ask()) if ask is not None else {}


@functools.cache
def _draining_nodes_call() -> Callable[[], dict[str, int]] | None:
    try:
        ask: Callable[[], dict[str, int]] = ray._private.state.state.get_draining_nodes
    except AttributeError:
        logger.warning(
            "Ray %s does not say which nodes it drains: nothing is saved because of it", ray.__version__
        )
        return None
    return ask


def is_resizing(previous_state: Any, current_state: Any) -> bool:
    """Whether a running worker group is about to be stopped for another size."""
    otherwise = "a resize loses the steps since the last checkpoint"
    running, resizing = (
        _find("execution.controller.state", name, otherwise) for name in ("RunningState", "ResizingState")
    )
    if running is None or resizing is None:
        return False
    return isinstance(previous_state, running) and isinstance(current_state, resizing)


def stop_wait_s() -> float:
    """Return how long ``ray job stop`` waits for a job before it kills it, seconds."""
    try:
        return float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "3"))
    except ValueError:
        return 3.0


_MANAGER_PARTS = (
    *("register_checkpoint", "_storage_context", "_checkpoint_config"),
    *("_checkpoint_results", "_current_report_index"),
)


class RayCheckpoints:
    """Ray Train's own list of checkpoints, in the controller. Used in its event loop alone."""

    def __init__(self, manager: Any, make_report: Callable[..., Any]) -> None:
        self._manager = manager
        self._make_report = make_report
        self._context = manager._storage_context

    @classmethod
    def of(cls, worker_group: Any) -> RayCheckpoints | None:
        """Return the list of the controller that started this group; None if this version of Ray hides it."""
        otherwise = "checkpoints are not registered with Ray Train"
        kind = _find("execution.checkpoint.checkpoint_manager", "CheckpointManager", otherwise)
        make_report = _find("execution.training_report", "_TrainingReport", otherwise)
        if kind is None or make_report is None:
            return None
        callbacks = getattr(worker_group, "_callbacks", ())
        manager = next((c for c in callbacks if isinstance(c, kind)), None)
        missing = [name for name in _MANAGER_PARTS if not hasattr(manager, name)]
        if missing:
            logger.warning(
                "Ray %s hides its list of checkpoints (%s): %s", ray.__version__, missing[0], otherwise
            )
            return None
        return cls(manager, make_report)

    @property
    def num_to_keep(self) -> int | None:
        """How many Ray Train keeps; None: all."""
        num_to_keep: int | None = self._manager._checkpoint_config.num_to_keep
        return num_to_keep

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
            manager.register_checkpoint(self._make_report(checkpoint, metrics, validation=False))
        finally:
            # get_all_reported_checkpoints() waits until it is the worker's own count.
            manager._current_report_index = num_reports


def after_train_function(*, on_return: Callable[[], None], on_error: Callable[[], None]) -> None:
    """Have a function called in this worker when its train function ends, in the same thread."""
    otherwise = "call Checkpointer.close() at the end of the train function, or its last steps are not saved"
    get_context = _find("execution.context", "get_train_context", otherwise)
    execution = getattr(get_context(), "execution_context", None) if get_context is not None else None
    runner = getattr(execution, "training_thread_runner", None)
    run = getattr(runner, "run", None)
    if runner is None or run is None:
        logger.warning("Ray %s hides the thread that trains: %s", ray.__version__, otherwise)
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

    runner.run = run_and_close
