"""docs/guide.md: what needs no Ray. tests/ray_jobs/users/test_guide.py runs the rest."""

import re
import subprocess
import sys

from typer.testing import CliRunner

from raycheck.cli import app
from tests.docs.guide import PAGE, ROOT, blocks, matches, sessions

MARKS = {"run", "run as train.py", "run in the run's store", "run after train.py"}


def test_every_program_of_the_page_is_run():
    """Each block of code has a mark, and each mark is known to a test."""
    marked = re.findall(r"<!-- (run.*?) -->\n```(?:python|console)\n", PAGE)
    assert set(marked) == MARKS
    assert len(marked) == len(re.findall(r"^```(?:python|console)$", PAGE, re.MULTILINE))


def test_the_programs_run_and_print_what_the_page_says(tmp_path):
    """One after the other in one process, as a reader would: plain torch, then with raycheck."""
    programs = blocks("run")
    assert len(programs) >= 3
    separator = "\n---8<---\n"
    text = "".join(f"{block.text}\nprint({separator!r}, end='')\n" for block in programs)
    (tmp_path / "all.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "all.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "attach() does nothing, nothing is saved" in done.stderr
    *printed, rest = done.stdout.split(separator)
    assert rest == ""
    assert printed == [block.output or "" for block in programs]


def test_the_sessions_print_what_the_page_says():
    """`raycheck plan`, which needs no run."""
    commands = sessions("run")
    assert commands
    for command, expected in commands:
        done = CliRunner().invoke(app, command.split()[1:])
        assert done.exit_code == 0, done.output
        assert matches(expected, done.output), done.output


def test_measured_numbers_are_the_readmes():
    """They stand in two places."""
    readme = (ROOT / "README.md").read_text()
    steps, first_s, more, second_s = re.search(
        r"cost (\d+) steps and ([\d.]+) s to the first new step, to the\s+whole job (\d+) steps and ([\d.]+) s",
        PAGE,
    ).groups()
    for number, seconds in ((steps, first_s), (more, second_s)):
        assert f"{number} steps taken again\n  {seconds:>4} s from the kill" in readme
