"""Runs to report on, each made once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raycheck.cli import app
from tests.report.made_up import MadeUp
from tests.report.reading import Page
from tests.report.runs import make_real_run

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


def report_on(run: Path, *arguments: object) -> Path:
    """Run the command and return its file."""
    output = run.parent / f"{run.name[:20]}.html"
    done = CliRunner().invoke(app, ["report", str(run), "--output", str(output), *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return output


@pytest.fixture(scope="session")
def made_up(folder):
    """A run of 400 events that tells all that it can, and its report."""
    run = MadeUp(folder / "made-up", 400)
    return run, report_on(folder / "made-up")


@pytest.fixture(scope="session")
def hostile(folder):
    """A run whose every text is markup, its name as well as a name can be, and its report."""
    run = folder / "<img src=x onerror=alert(1)>"
    MadeUp(run, 400, word=HOSTILE)
    return report_on(run)


@pytest.fixture(scope="session")
def long_run(folder):
    """A run of 20,000 events, and its report."""
    return MadeUp(folder / "long", 20_000), report_on(folder / "long")


@pytest.fixture(scope="session")
def real_run(folder):
    """Three generations of real processes: resized, stopped, and finished."""
    make_real_run(folder / "real", num_commits=1, interval_steps=15)
    return folder / "real"


@pytest.fixture(scope="session")
def page_of():
    return lambda path: Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def browser():
    """A real Chromium that finds nothing outside this machine.

    Not for the whole session: its loop runs in this thread, which then can run no other.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser on this machine: none of {', '.join(_BROWSERS)} is on the PATH")
    arguments = [
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
    ]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=arguments)
        yield started
        started.close()
