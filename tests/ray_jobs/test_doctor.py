"""``raycheck doctor --address`` on a real cluster."""

import json

from typer.testing import CliRunner

from raycheck.cli import app


def doctor(*arguments):
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.output)


def test_each_node_of_a_cluster_is_checked(ray_head, tmp_path):
    """By a task on it, which tries the store from there."""
    code, report = doctor(
        "--address", ray_head, "--storage", tmp_path, "--probe-size", "1MB", "--bytes", "1MB"
    )
    (machine,) = report["machines"]
    found = {finding["topic"]: finding for finding in machine["findings"]}
    assert code == 0, report
    assert found["storage"]["status"] == found["ray"]["status"] == "ok"
    code, report = doctor("--address", ray_head, "--storage", "nosuch://place")
    assert code == 1
    found = {finding["topic"]: finding for finding in report["machines"][0]["findings"]}
    assert "unknown scheme" in found["storage"]["text"]
