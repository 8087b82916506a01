"""A real coordinator with real processes, as ``raycheck watch`` sees it; and the log beside it."""

import inspect
import io
import itertools
import json
import logging
import re
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from raycheck.cli import app
from raycheck.cli import watch as command
from raycheck.observe.watch import view_of_status
from raycheck.observe.watch_text import plain, screen
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster, wait_until

DOCS = Path(__file__).parents[2] / "docs"


class Status:
    """A source of views: the coordinator in this process, until the test has seen enough."""

    every_s = 0.1

    def __init__(self, cluster, is_enough):
        self._cluster, self._is_enough = cluster, is_enough
        self.views = []
        self._deadline_s = time.monotonic() + 120

    def look(self):
        if self.views and self._is_enough(self.views):
            return None
        assert time.monotonic() < self._deadline_s, self.views[-1]
        self.views.append(view_of_status(self._cluster.status(), time.time()))
        return self.views[-1]


@pytest.fixture
def cluster(tmp_path):
    made = LocalCluster(
        str(tmp_path / "gpt" / "raycheck"), upload_bytes_per_s=1e6, recovery_point_s=1.0, keep_last=2
    )
    yield made
    made.close()


def uploads_of(views):
    return [upload for view in views for upload in view.uploads]


def has_seen_all(views):
    partial = [upload for upload in uploads_of(views) if 0 < upload.num_bytes_done < upload.num_bytes]
    return bool(partial) and (views[-1].num_checkpoints or 0) >= 2


def test_a_job_is_followed_and_its_store_tells_the_rest(cluster, tmp_path, capsys, caplog):
    """Steps, uploads under way, what is at risk; one log line a checkpoint; when all is over, from telemetry."""
    caplog.set_level(logging.INFO, logger="raycheck")
    stop = tmp_path / "stop"
    config = {"steps": 10**8, "step_s": 0.01, "width": 15_000, "stop_file": str(stop)}
    group = cluster.start(jobs.train, config, world_size=2)
    source = Status(cluster, has_seen_all)
    command.follow_in_lines(source.look(), source)
    check_views(source.views)
    printed = capsys.readouterr().out
    assert "gpt, g1, 2 ranks" in printed
    assert printed.count("MB committed") >= 2
    check_screen(source.views[-1])
    stop.touch()
    group.results()
    wait_until(lambda: cluster.status()["phase"] == "training", "the end of the last checkpoint")
    check_log(caplog.records, cluster.status()["num_checkpoints"])
    cluster.coordinator.close()
    check_store(tmp_path / "gpt", cluster)
    cluster.replace_coordinator()


def check_views(views):
    steps = [view.step for view in views if view.step is not None]
    assert steps == sorted(steps)
    assert steps[-1] > 0
    last = views[-1]
    assert last.steps_per_s > 0
    assert last.safe_step > 0
    # What is at risk grows until a checkpoint is committed, and falls then.
    risks = [view.at_risk_steps for view in views if view.at_risk_steps is not None]
    assert any(later < earlier for earlier, later in itertools.pairwise(risks))
    assert all(view.at_risk_steps == view.step - view.safe_step for view in views if view.step is not None)
    assert {view.phase for view in views} & {"uploading", "copying"}
    upload = uploads_of(views)[-1]
    assert (upload.node, upload.ranks, upload.num_bytes) == (
        "node0",
        (0, 1),
        last.last_checkpoint.count("num_bytes"),
    )


def check_screen(view):
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None, highlight=False)
    command.show_once(view, console, as_json=False)
    lines = out.getvalue().splitlines()
    assert [line.rstrip() for line in lines] == [plain(line) for line in screen(view, width=80)]
    assert all(len(line) <= 80 for line in lines)


def check_log(records, num_checkpoints):
    lines = [record for record in records if record.getMessage().startswith("checkpoint of step")]
    assert len(lines) == num_checkpoints
    facts = lines[-1].raycheck
    assert (
        f"checkpoint of step {facts['step']}: stall {facts['stall_s'] * 1e3:.1f} ms" in lines[-1].getMessage()
    )
    assert facts["num_bytes"] > 1_000_000
    assert set(facts) == {
        "event", "generation", "step", "stall_s", "persist_s", "num_bytes", "interval_s", "decided_by", "overhead",
        "max_overhead",
    }  # fmt: skip
    # Beside it only changes of the interval, and what went wrong.
    others = [r for r in records if r not in lines and r.name == "raycheck" and r.levelno == logging.INFO]
    assert all(record.getMessage().startswith("interval ") for record in others), others


def check_store(run, cluster):
    done = CliRunner().invoke(app, ["watch", str(run), "--from-store", "--once"], env={"COLUMNS": "80"})
    assert done.exit_code == 1, done.output
    lines = done.output.splitlines()
    assert lines[:2] == ["gpt, g1, 2 ranks, from telemetry alone", "the job is over"]
    done = CliRunner().invoke(app, ["watch", str(run), "--from-store", "--json"])
    assert done.exit_code == 0, done.output
    (look,) = map(json.loads, done.output.splitlines())
    assert look["safe_step"] == max(cluster.committed_steps())
    assert look["events"][-1]["kind"] == "closed"


def test_what_cannot_be_watched_is_refused_with_what_to_do(tmp_path):
    """Exit code 2."""
    for arguments, text in (
        (["--from-store"], "--from-store needs RUN"),
        ([str(tmp_path), "--from-store"], "there is no raycheck run in"),
        (["--address", "127.0.0.1:1"], "--address 127.0.0.1:1: no Ray cluster can be reached"),
        (["x", "--every", "0"], "--every"),
    ):
        done = CliRunner().invoke(app, ["watch", *arguments])
        assert done.exit_code == 2, done.output
        assert text in " ".join(done.output.split())


def test_the_coordinator_of_a_run_is_chosen_among_all():
    """By URL or name; of a run that has started again the newest; of two that have one name neither."""
    statuses = {
        "b": {"store_url": "s3://b/x/gpt/raycheck", "generation": "g000001-aa"},
        "a": {"store_url": "s3://b/x/gpt/raycheck", "generation": "g000002-bb"},
        "c": {"store_url": "s3://b/y/bert/raycheck", "generation": None},
        "d": {"store_url": "s3://b/z/bert/raycheck", "generation": None},
    }
    assert command.choose("gpt", statuses)[0] == "a"
    assert command.choose("s3://b/y/bert", statuses)[0] == "c"
    assert command.choose("llama", statuses) is None
    with pytest.raises(Exception, match="RUN=bert: 2 runs have this name") as raised:
        command.choose("bert", statuses)
    assert "s3://b/z/bert" in str(raised.value)


def test_exit_codes_are_those_of_the_page():
    """The table in docs/cli.md, and the help."""
    (row,) = re.findall(
        r"^\| `watch` \| (.*) \| (.*) \| (.*) \|$", (DOCS / "cli.md").read_text(), re.MULTILINE
    )
    help_text = " ".join(inspect.getdoc(command.watch).split())
    assert re.search(r"Exit codes: 0 (.*?); 1 (.*?); 2 (.*?)\.", help_text).groups() == row
    done = CliRunner().invoke(app, ["watch", "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "raycheck watch gpt --address" in done.output
