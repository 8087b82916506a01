"""A Grafana dashboard, made from the list of metrics: it cannot ask for one that does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from raycheck.observe.metrics_names import (
    AT_RISK,
    AT_RISK_STEPS,
    ATTEMPTS_FAILED,
    BYTES_STORED,
    CHECKPOINTS,
    COMMITTED_STEP,
    FAILURES_IN_A_ROW,
    INTERVAL,
    MAX_OVERHEAD,
    MTTF,
    OVERHEAD,
    PERSIST,
    RESTORE,
    RESTORES,
    RUN_NAME_TAG,
    STALL,
    STEP,
    STEP_RATE,
    STEP_TIME,
    WORLD_SIZE,
    Metric,
)

UID = "raycheck"
_RUN = f'{RUN_NAME_TAG}=~"$run"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WINDOW = "30m"
"""What quantiles and counts are over: checkpoints are minutes apart."""

Unit = Literal["short", "s", "decbytes", "percentunit"]


class _Query(NamedTuple):
    metric: Metric
    expression: str
    legend: str


class _Panel(NamedTuple):
    title: str
    unit: Unit
    queries: Sequence[_Query]
    kind: Literal["stat", "timeseries"] = "timeseries"
    is_log: bool = False


def make_dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it: with variables for the data source and the run."""
    panels = _laid_out([*_now(), *_over_time()])
    return {
        "uid": UID,
        "title": "raycheck",
        "description": "Checkpoints of Ray Train jobs, by raycheck.",
        "tags": ["ray", "raycheck"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _now() -> list[_Panel]:
    """Return the numbers that stand at the top."""

    def stat(title: str, unit: Unit, metric: Metric) -> _Panel:
        return _Panel(title, unit, [_value(metric)], "stat")

    return [
        stat("Committed step", "short", COMMITTED_STEP),
        stat("At risk", "s", AT_RISK),
        stat("Overhead", "percentunit", OVERHEAD),
        stat("Interval", "s", INTERVAL),
        stat("Failed saves in a row", "short", FAILURES_IN_A_ROW),
        stat("Ranks", "short", WORLD_SIZE),
    ]


def _over_time() -> list[_Panel]:
    steps = [_value(STEP, "step"), _value(COMMITTED_STEP, "committed"), _value(AT_RISK_STEPS, "at risk")]
    saves = [_count(CHECKPOINTS, "checkpoints"), _count_by(ATTEMPTS_FAILED)]
    overhead = [_value(OVERHEAD, "overhead"), _value(MAX_OVERHEAD, "bound")]
    return [
        _Panel("Overhead and its bound", "percentunit", overhead),
        _Panel("At risk if the job died now", "s", [_value(AT_RISK)]),
        _Panel("Interval", "s", [_value(INTERVAL)]),
        _Panel("Steps", "short", steps),
        _Panel("Steps a second", "short", [_value(STEP_RATE)]),
        _Panel("Step time without checkpoints", "s", [_value(STEP_TIME)]),
        _Panel("Stall of a snapshot", "s", _quantiles(STALL)),
        _Panel("Upload of a checkpoint", "s", _quantiles(PERSIST)),
        _Panel(f"Bytes stored in {_WINDOW}", "decbytes", [_count(BYTES_STORED, "bytes")]),
        _Panel(f"Checkpoints and failed saves in {_WINDOW}", "short", saves),
        _Panel(f"Restores in {_WINDOW}", "short", [_count_by(RESTORES)]),
        _Panel("Time of a restore", "s", _quantiles(RESTORE)),
        # Weeks before the first failure, perhaps minutes after it.
        _Panel("Expected time to failure", "s", [_value(MTTF)], is_log=True),
    ]


# Queries. Each takes a metric of the list, never a name.


def _value(metric: Metric, what: str = "") -> _Query:
    legend = " ".join(filter(None, ["{{" + RUN_NAME_TAG + "}}", what]))
    return _Query(metric, f"max by ({RUN_NAME_TAG}) ({metric.exported_name}{{{_RUN}}})", legend)


def _count(metric: Metric, legend: str) -> _Query:
    return _Query(metric, f"sum({_increase(metric.exported_name)})", legend)


def _count_by(metric: Metric) -> _Query:
    (tag,) = metric.tags
    return _Query(metric, f"sum by ({tag}) ({_increase(metric.exported_name)})", "{{" + tag + "}}")


def _quantiles(metric: Metric) -> list[_Query]:
    series = _increase(f"{metric.exported_name}_bucket")
    return [
        _Query(metric, f"histogram_quantile({quantile}, sum by (le) ({series}))", legend)
        for quantile, legend in ((0.5, "median"), (0.95, "95 %"))
    ]


def _increase(name: str) -> str:
    """Return by how much counters rose in the window.

    Prometheus' ``increase`` takes the first value that it sees for where a
    counter began. Ray exports none before it has counted something, and each
    coordinator has its own: a restore, of which each sees one, would never show.
    Where Ray is told to leave out its processes' labels, a new coordinator's
    count follows the old one's in one series, and this shows too little.
    """
    series = f"{name}{{{_RUN}}}"
    newest = f"max_over_time({series}[{_WINDOW}])"
    return f"clamp_min({newest} - ({series} offset {_WINDOW} or 0 * {newest}), 0)"


# Grafana's own format.


def _variables() -> list[dict[str, Any]]:
    query = f"label_values({STEP.exported_name}, {RUN_NAME_TAG})"
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
        },
        {
            "name": "run",
            "label": "Run",
            "type": "query",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "run"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "sort": 1,
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _laid_out(panels: Sequence[_Panel]) -> list[dict[str, Any]]:
    """Return panels in Grafana's grid of 24 columns: stats six in a row, the others two."""
    laid, column, row = [], 0, 0
    for number, panel in enumerate(panels, 1):
        width, height = (4, 4) if panel.kind == "stat" else (12, 8)
        laid.append(_to_json(panel, number, {"x": column, "y": row, "w": width, "h": height}))
        column += width
        if column >= 24:
            column, row = 0, row + height
    return laid


def _to_json(panel: _Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.is_log:
        defaults = {"unit": panel.unit, "custom": {"scaleDistribution": {"type": "log", "log": 10}}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": " ".join(dict.fromkeys(query.metric.help for query in panel.queries)),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }
