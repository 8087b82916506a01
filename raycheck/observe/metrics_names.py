"""All metrics that raycheck exports: the one place that names them.

Named and tagged as Ray Train's own are, so that both can be asked for by the
same run. The coordinator records them; the dashboard is made from this list.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

RUN_NAME_TAG = "ray_train_run_name"
RUN_ID_TAG = "ray_train_run_id"
"""As Ray Train tags its metrics. Every metric here has both."""

EXPORT_PREFIX = "ray_"
"""What Ray puts before the name of each metric when it exports it."""

_SHORT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LONG_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)

Kind = Literal["counter", "gauge", "histogram"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: what it is called, what it says, and in which unit."""

    name: str
    kind: Kind
    help: str
    unit: Literal["", "steps", "bytes", "s", "ratio"]
    """"": a plain count. "ratio": 0.035 is 3.5 %."""

    tags: tuple[str, ...] = ()
    """Besides those of the run."""

    boundaries: tuple[float, ...] = ()
    """Of a histogram's buckets, rising."""

    status_key: str | None = None
    """Of a gauge: where `Coordinator.status` has its value."""

    @property
    def exported_name(self) -> str:
        """The name that a scrape shows; of a histogram without the suffixes of its series."""
        return EXPORT_PREFIX + self.name


def _counter(name: str, unit: Literal["", "bytes"], help: str, *tags: str) -> Metric:
    return Metric(name=name, kind="counter", unit=unit, help=help, tags=tags)


def _gauge(name: str, unit: Literal["", "steps", "s", "ratio"], status_key: str, help: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, status_key=status_key, help=help)


def _histogram(name: str, boundaries: tuple[float, ...], help: str, *tags: str) -> Metric:
    return Metric(name=name, kind="histogram", unit="s", help=help, tags=tags, boundaries=boundaries)


# What happened.

CHECKPOINTS = _counter("train_raycheck_checkpoints_total", "", "Checkpoints that were committed.")
BYTES_STORED = _counter(
    "train_raycheck_stored_bytes_total", "bytes", "Bytes of committed checkpoints, all ranks together."
)
ATTEMPTS_FAILED = _counter(
    "train_raycheck_attempts_failed_total", "", "Snapshots that did not become a checkpoint.", "reason"
)
RESTORES = _counter("train_raycheck_restores_total", "", "Times that all ranks restored.", "source")
STALL = _histogram(
    "train_raycheck_stall_s", _SHORT_S, "Training time blocked by one snapshot, the slowest rank's."
)
PERSIST = _histogram("train_raycheck_persist_s", _LONG_S, "From snapshot to durable, the slowest rank's.")
RESTORE = _histogram("train_raycheck_restore_s", _LONG_S, "Time in attach(), the slowest rank's.", "source")

# How it stands.

STEP = _gauge("train_raycheck_step", "steps", "step", "The newest step that rank 0 was seen at.")
COMMITTED_STEP = _gauge(
    "train_raycheck_committed_step",
    "steps",
    "safe_step",
    "The newest step that is committed: what a restart would restore.",
)
STEP_RATE = _gauge("train_raycheck_steps_per_s", "steps", "steps_per_s", "Steps a second, of late.")
STEP_TIME = _gauge(
    "train_raycheck_step_time_s", "s", "step_s", "A step's time while nothing is copied or uploaded."
)
INTERVAL = _gauge("train_raycheck_interval_s", "s", "interval_s", "Time between snapshots, as chosen now.")
OVERHEAD = _gauge(
    "train_raycheck_overhead_ratio", "ratio", "overhead", "Measured cost of checkpoints over time in steps."
)
MAX_OVERHEAD = _gauge(
    "train_raycheck_max_overhead_ratio", "ratio", "max_overhead", "The bound on that cost: max_overhead."
)
AT_RISK = _gauge(
    "train_raycheck_at_risk_s", "s", "at_risk_s", "Training time that would be lost if the job died now."
)
AT_RISK_STEPS = _gauge(
    "train_raycheck_at_risk_steps", "steps", "at_risk_steps", "Steps that would be lost if the job died now."
)
MTTF = _gauge("train_raycheck_mttf_s", "s", "mttf_s", "Expected time to failure of the whole job.")
WORLD_SIZE = _gauge("train_raycheck_world_size", "", "world_size", "Ranks of the job.")
FAILURES_IN_A_ROW = _gauge(
    "train_raycheck_failures_in_a_row", "", "failures_in_a_row", "Saves that failed since the last commit."
)

METRICS: tuple[Metric, ...] = (
    CHECKPOINTS,
    BYTES_STORED,
    ATTEMPTS_FAILED,
    RESTORES,
    STALL,
    PERSIST,
    RESTORE,
    STEP,
    COMMITTED_STEP,
    STEP_RATE,
    STEP_TIME,
    INTERVAL,
    OVERHEAD,
    MAX_OVERHEAD,
    AT_RISK,
    AT_RISK_STEPS,
    MTTF,
    WORLD_SIZE,
    FAILURES_IN_A_ROW,
)

GAUGES: tuple[Metric, ...] = tuple(metric for metric in METRICS if metric.kind == "gauge")
