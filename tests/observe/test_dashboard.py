"""The dashboard and the list of metrics."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raycheck.cli import app
from raycheck.observe.metrics_names import EXPORT_PREFIX, GAUGES, METRICS, RUN_NAME_TAG

NAMES = {metric.exported_name for metric in METRICS}


@pytest.fixture(scope="module")
def dashboard():
    done = CliRunner().invoke(app, ["dashboard"])
    assert done.exit_code == 0
    return json.loads(done.output)


def expressions(dashboard):
    variables = [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]] + variables


def asked(expression):
    """Return the metrics that an expression asks for: whatever stands before a selector or is a first argument."""
    found = re.findall(r"\b([a-z_]+)\{", expression) + re.findall(r"label_values\((\w+)", expression)
    return [name.removesuffix("_bucket") for name in found]


def test_it_asks_for_all_metrics_and_for_no_other(dashboard):
    """Each expression names at least one metric, and each metric is in one."""
    names = [asked(expression) for expression in expressions(dashboard)]
    assert all(names)
    assert {name for each in names for name in each} == NAMES


def test_each_query_is_of_the_chosen_run(dashboard):
    """And the variable lists the runs there are."""
    (variable,) = [v for v in dashboard["templating"]["list"] if v["name"] == "run"]
    assert RUN_NAME_TAG in variable["definition"]
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            assert f'{RUN_NAME_TAG}=~"$run"' in target["expr"]
            assert target["expr"].count("(") == target["expr"].count(")")


def test_quantiles_are_of_histograms_and_increases_of_counters(dashboard):
    """An increase of a gauge would be drawn, and mean nothing."""
    kinds = {metric.exported_name: metric.kind for metric in METRICS}
    for expression in expressions(dashboard)[:-1]:
        (name,) = set(asked(expression))
        expected = {"gauge": "max by", "counter": "sum", "histogram": "histogram_quantile"}[kinds[name]]
        assert expression.startswith(expected)
        assert ("max_over_time(" in expression) == (kinds[name] != "gauge")


def test_panels_do_not_overlap(dashboard):
    """Within Grafana's 24 columns; ids are each one's own."""
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_metrics_are_named_as_prometheus_and_ray_train_have_it():
    """Prefix, unit at the end, a sentence, and rising boundaries."""
    assert len(NAMES) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"train_raycheck_[a-z_]+", metric.name)
        assert metric.exported_name.startswith(EXPORT_PREFIX)
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.boundaries) == (metric.kind == "histogram")
        assert list(metric.boundaries) == sorted(set(metric.boundaries))
        assert bool(metric.status_key) == (metric.kind == "gauge")
        if metric.unit == "s":
            assert metric.name.endswith("_s")
    assert {metric.status_key for metric in GAUGES} >= {"step", "overhead"}


def test_the_page_lists_all_metrics():
    """docs/watch.md has the list as it is."""
    page = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()
    rows = re.findall(r"^\| `(ray_\w+)` \| (\w+) \| (\S+) \| (.*?)(?: By `\w+`\.)? \|$", page, re.MULTILINE)
    assert rows == [(m.exported_name, m.kind, m.unit or "-", m.help) for m in METRICS]
