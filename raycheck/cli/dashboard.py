"""``raycheck dashboard``: raycheck's metrics in Grafana."""

from __future__ import annotations

import json

import typer


def dashboard() -> None:
    """Print a Grafana dashboard of raycheck's metrics, as JSON.

    For a Prometheus that scrapes the Ray cluster. Import the file in Grafana (Dashboards, New, Import), or put it where
    Grafana is provisioned from. It asks for the data source, and has a variable for the run.

    Exit codes: 0 printed.

    Examples:
        raycheck dashboard > raycheck.json
    """
    from raycheck.observe.dashboard import make_dashboard

    typer.echo(json.dumps(make_dashboard(), indent=2))
