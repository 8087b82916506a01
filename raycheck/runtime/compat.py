"""The only file that touches Ray Train's internals.

Tested with Ray 2.60. Hooks are looked up when they are used, so that a version
without one degrades with a message instead of an AttributeError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

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
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils

from raycheck.core.failure_rate import FailureKind

logger = logging.getLogger("raycheck")

TESTED_RAY_VERSIONS = ("2.60",)

__all__ = [
    "ControllerCallback",
    "WorkerCallback",
    "WorkerGroupCallback",
    "after_train_function",
    "failure_kind",
    "is_local_run",
    "is_replica_group_run",
    "node_ids",
    "rank_and_sizes",
    "run_path",
    "run_was_named",
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
