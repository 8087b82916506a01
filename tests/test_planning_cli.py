"""``raycheck plan`` and ``raycheck simulate``."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
import typer
from typer.testing import CliRunner

from raycheck.cli.loss_plot import loss_plot_svg
from raycheck.cli.planning import app, parse_bytes
from raycheck.core.interval import Costs, Failures, Limits, choose_interval

ANCHOR = ["--stall", "2", "--persist", "120", "--slowdown", "0.03", "--restart", "600"]


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_plan_prints_the_decision_the_losses_and_other_sizes():
    """What a person reads."""
    output = run("plan", "--gpus", 1_024, *ANCHOR)
    assert "interval 1,878 s: expected time to failure 3.7 days, a checkpoint costs 5.6 s" in output
    assert "ETTR 99.18 %" in output
    for word in ("stall", "work done again after failures", "restarts", "131,072"):
        assert word in output


def test_plan_as_json_has_the_same():
    """What a program reads: the anchors at 8, 512 and 131,072 GPUs included."""
    report = json.loads(run("plan", "--gpus", 16_384, "--json", *ANCHOR))
    assert report["interval_s"] == pytest.approx(467, abs=0.5)
    assert report["ettr"] == pytest.approx(0.9415, abs=5e-5)
    assert report["loss"]["total"] == pytest.approx(1 - report["ettr"])
    assert [size["gpus"] for size in report["sizes"]] == [8 * 4**i for i in range(8)]
    assert report["sizes"][0]["interval_s"] == pytest.approx(21_288.5, abs=0.5)


def test_costs_follow_from_bytes_and_rates():
    """10 GB at 200 MB/s is 50 s; copied at 10 GB/s it is a second."""
    report = json.loads(run("plan", "--bytes", "10GB", "--bandwidth", "200MB/s", "--json"))
    assert report["overhead"] * report["interval_s"] == pytest.approx(1 + 0.03 * 50)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512", 512), ("3.5GB", 3.5e9), ("200 MB/s", 2e8), ("4GiB", 4 * 2**30), ("1k", 1e3), ("2e3MB", 2e9)],
)
def test_sizes_are_read(text, num_bytes):
    """Decimal and binary units, with or without a rate."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "3 apples", "-1GB", "1.2.3GB", "5i"])
def test_other_texts_are_refused(text):
    """With an example of what is meant."""
    with pytest.raises(typer.BadParameter, match=r"3\.5GB"):
        parse_bytes(text)


def test_plan_shows_a_conflict_or_refuses_it():
    """All three behaviours reach the command line."""
    tight = ["--stall", 10, "--persist", 20, "--recovery-point", 120, "--json"]
    bound = json.loads(run("plan", *tight))
    assert bound["decided_by"] == "overhead_bound"
    assert "recovery_point_s is not kept" in bound["reason"]
    point = json.loads(run("plan", *tight, "--on-conflict", "recovery_point"))
    assert point["period_s"] == pytest.approx(100.0)
    assert "recovery_point_s=120.0 cannot be kept" in " ".join(
        run("plan", *tight, "--on-conflict", "error", code=2).replace("│", " ").split()
    )


@pytest.mark.parametrize("arguments", [["--gpus", 0], ["--max-overhead", 0], ["--bandwidth", "0"]])
def test_bad_options_end_with_a_message(arguments):
    """No traceback."""
    output = run("plan", *arguments, code=2)
    assert "Error" in output
    assert "Traceback" not in output


def test_the_plot_is_a_file_that_stands_alone(tmp_path):
    """Well-formed SVG, nothing fetched, both colour schemes, chosen point and constraints."""
    path = tmp_path / "loss.svg"
    run("plan", "--gpus", 1_024, "--recovery-point", 900, "--plot", path, *ANCHOR)
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert "href" not in text
    for label in ("chosen: 774 s", "best", "bound 3.5 %", "uploads keep up", "recovery point 900 s"):
        assert label in text
    coordinates = [
        float(number)
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
        for pair in line.attrib["points"].split()
        for number in pair.split(",")
    ]
    assert coordinates
    assert all(0 <= number <= 760 for number in coordinates)


@pytest.mark.parametrize("gpu_days", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize("stall_s", [1e-6, 100.0])
def test_the_plot_bears_extremes(gpu_days, stall_s):
    """A loss of nothing or of all is drawn as well."""
    costs = Costs(step_s=0.01, stall_s=stall_s, persist_s=1.0, restart_s=10.0)
    decision = choose_interval(costs, Failures(gpu_days_per_failure=gpu_days, num_gpus=8), Limits())
    assert "nan" not in loss_plot_svg(decision)


def test_what_cannot_be_drawn_is_refused():
    """No rate, or nothing finite."""
    costs = Costs(step_s=0.0, stall_s=0.0, persist_s=0.0)
    for failures in (None, Failures(gpu_days_per_failure=1.0, num_gpus=1)):
        with pytest.raises(ValueError, match="a plot of the loss needs"):
            loss_plot_svg(choose_interval(costs, failures, Limits()))


SHORT = ["simulate", "--gpus", 1_024, "--days", 2, "--runs", 3, "--gpu-days-per-failure", 300, "--json"]


@pytest.mark.parametrize("policy", ["tuned", "fixed", "checkfreq", "young-daly", "continuous"])
@pytest.mark.parametrize("failures", ["exponential", "weibull", "bathtub"])
def test_simulate_knows_all_policies_and_failures(policy, failures):
    """Each gives an ETTR, and the same one again."""
    arguments = [*SHORT, "--policy", policy, "--failures", failures]
    first = json.loads(run(*arguments))
    assert 0.5 < first["ettr"]["mean"] < 1
    assert first == json.loads(run(*arguments))
    assert first != json.loads(run(*arguments, "--seed", 100))


def test_simulate_reads_recorded_failures(tmp_path):
    """One time in seconds a line, comments allowed."""
    path = tmp_path / "failures.txt"
    path.write_text("# seconds since the start\n3600\n\n7200  # node 17\n")
    report = json.loads(run(*SHORT, "--failures", path))
    assert report["failures"]["mean"] == 2
    assert "neither" in run(*SHORT, "--failures", tmp_path / "missing", code=2)
    path.write_text("yesterday\n")
    assert "Traceback" not in run(*SHORT, "--failures", path, code=2)


def test_simulate_prints_a_table():
    """Mean and standard error of each."""
    output = run(*SHORT[:-1])
    for word in ("ettr", "overhead", "recomputed", "failures", "standard error"):
        assert word in output
