"""raycheck's metrics in Ray: recorded in the coordinator's process alone, never in a training process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ray.util import metrics as ray_metrics

from raycheck.observe.metrics_names import GAUGES, METRICS, RUN_ID_TAG, RUN_NAME_TAG, Metric
from raycheck.runtime.reporting import Measure

logger = logging.getLogger("raycheck")

_GAUGES_EVERY_S = 5.0


class RayMetrics:
    """The metrics of one run. Thread-safe. Ray exports them from this node's metrics port.

    Args:
        run_name: As Ray Train has it.
        run_id: As Ray Train has it.
    """

    def __init__(self, *, run_name: str, run_id: str) -> None:
        self._run_tags = {RUN_NAME_TAG: run_name, RUN_ID_TAG: run_id}
        self._made = {metric.name: _make(metric) for metric in METRICS}
        self._has_failed = False

    def measure(self, metric: Metric, value: float, **tags: str) -> None:
        """Count, set or observe a number. Does not block; a metric that fails costs the run nothing.

        Args:
            metric: Which.
            value: In its unit.
            tags: Those that the metric has besides the run's.
        """
        made = self._made[metric.name]
        all_tags = {**self._run_tags, **tags}
        try:
            if isinstance(made, ray_metrics.Counter):
                # Ray refuses to count nothing.
                if value > 0:
                    made.inc(value, all_tags)
            elif isinstance(made, ray_metrics.Gauge):
                made.set(value, all_tags)
            else:
                made.observe(value, all_tags)
        except Exception as error:  # noqa: BLE001  whatever Ray raises, training goes first
            if not self._has_failed:
                self._has_failed = True
                logger.warning("metrics cannot be recorded, and training goes on without: %s", error)


def _make(metric: Metric) -> ray_metrics.Counter | ray_metrics.Gauge | ray_metrics.Histogram:
    keys = (RUN_NAME_TAG, RUN_ID_TAG, *metric.tags)
    if metric.kind == "counter":
        return ray_metrics.Counter(metric.name, description=metric.help, tag_keys=keys)
    if metric.kind == "gauge":
        return ray_metrics.Gauge(metric.name, description=metric.help, tag_keys=keys)
    return ray_metrics.Histogram(
        metric.name, description=metric.help, boundaries=list(metric.boundaries), tag_keys=keys
    )


class GaugeThread:
    """Sets all gauges every five seconds, and once more at the end.

    Args:
        status: How the run stands, as `Coordinator.status` returns it.
        measure: Where the numbers go.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]], measure: Measure) -> None:
        self._status = status
        self._measure = measure
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raycheck-gauges", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Set them for the last time. Blocks for that."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_GAUGES_EVERY_S):
            self._set()
        self._set()

    def _set(self) -> None:
        try:
            status = self._status()
        except Exception:
            logger.exception("the metrics miss a moment and go on")
            return
        if status.get("phase") == "restoring":
            # What is restored is not decided yet: the last values hold on, where a 0 would look like a loss.
            return
        for metric in GAUGES:
            value = status.get(metric.status_key or "")
            if value is not None:
                self._measure(metric, float(value))
