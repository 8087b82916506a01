"""A stored run, made once by real processes, and copies of it for tests that change it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from raycheck.cli import app
from tests.cli import jobs
from tests.runtime.harness import LocalCluster


@pytest.fixture(scope="session")
def master_run(tmp_path_factory):
    """A run of two starts on two ranks.

    The first saved steps 2 and 3; the second went back to step 2, so that step
    3 of the first is left behind, and saved steps 3, 4 and 5.
    """
    folder = tmp_path_factory.mktemp("cli")
    for resume, steps, save_at in (("auto", 3, [2]), (2, 5, [3, 4])):
        cluster = LocalCluster(
            str(folder / "gpt" / "raycheck"), interval_steps=1_000_000, keep_last=100, resume=resume
        )
        try:
            config = {"steps": steps, "save_at": save_at, "folder": str(folder)}
            cluster.start(jobs.train, config, world_size=2).results()
        finally:
            cluster.close()
    return folder


@pytest.fixture
def stored(master_run, tmp_path):
    """A copy of the run, in a folder as Ray Train names it."""
    shutil.copytree(master_run / "gpt", tmp_path / "gpt")
    return tmp_path / "gpt"


@pytest.fixture
def live(master_run):
    """What rank 0 held at step 4, by the names that it is stored under."""
    tensors = torch.load(master_run / "live-4.pt")
    assert len(tensors) == 22
    return tensors


@pytest.fixture
def raycheck():
    """Run the command; return its exit code and what it printed."""

    def run(*arguments, input=None):
        done = CliRunner().invoke(app, [*map(str, arguments)], input=input)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return done.exit_code, done.output

    return run


@pytest.fixture
def raycheck_json(raycheck):
    """Run the command with --json; return its exit code and what it printed."""

    def run(*arguments):
        code, output = raycheck(*arguments, "--json")
        report = json.loads(output)
        assert report["exit_code"] == code
        return code, report

    return run


@pytest.fixture
def on_s3(stored, s3_url):
    """The same run on a real S3 server: its URL and the options for it."""
    for path in stored.rglob("*"):
        if path.is_file():
            key = f"{s3_url.prefix}/gpt/{path.relative_to(stored)}"
            s3_url.client.put_object(Bucket=s3_url.bucket, Key=key, Body=path.read_bytes())
    return f"{s3_url.url}/gpt", ["--storage-options", json.dumps(s3_url.options)]
