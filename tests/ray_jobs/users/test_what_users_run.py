"""The README's program and the demo, run as a user would."""

import glob
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.runtime.harness import wait_until

# Starts and ends clusters of its own: minutes where the machine has other work.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[3]


def first_program(path: Path) -> str:
    return re.search(r"```python\n(.*?)```", path.read_text(), re.DOTALL)[1]


def test_the_readme_shows_the_minimal_example():
    """One program, in one place."""
    assert first_program(ROOT / "README.md") == (ROOT / "examples" / "minimal.py").read_text()


def test_the_readmes_program_runs_and_has_nothing_to_do_the_second_time(ray_head, tmp_path):
    """What the first screen shows is a program that works as it is."""
    text = first_program(ROOT / "README.md").replace("/tmp/raycheck-readme", str(tmp_path / "storage"))
    assert str(tmp_path) in text
    program = tmp_path / "train.py"
    program.write_text(text)
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, program],
            env={**os.environ, "RAY_ADDRESS": ray_head},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout + done.stderr)
    assert "there is nothing left to train" not in outputs[0]
    assert "there is nothing left to train" in outputs[1]


def start_demo(folder: Path, *options: str) -> subprocess.Popen:
    raycheck = Path(sys.executable).with_name("raycheck")
    return subprocess.Popen(
        [raycheck, "demo", *options],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Tests that run in the background of a shell ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def ray_folders() -> set[str]:
    return set(glob.glob(f"{tempfile.gettempdir()}/raycheck-demo-*"))


def left_over(folders: set[str]) -> list[str]:
    """Return command lines of processes that belong to these Ray folders."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(folder in line for folder in folders):
            found.append(line)
    return found


def test_the_demo_passes_its_own_checks(tmp_path):
    """Killed twice, bit for bit the same end; no process and no Ray folder is left."""
    before = ray_folders()
    demo = start_demo(tmp_path, "--samples", "1000")
    wait_until(lambda: ray_folders() - before, "the demo's Ray")
    mine = ray_folders() - before
    output, _ = demo.communicate(timeout=800)
    # The third check compares times, which others on this machine may spoil; these two they cannot.
    assert "ok      all" in output, output
    assert "ok      each of 1000 samples" in output, output
    assert demo.returncode == int("FAILED  the measured overhead" in output), output
    assert output.count("SIGKILL to a worker") == 2, output
    assert not ray_folders() & mine
    assert not left_over(mine)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(tmp_path, number):
    """Ctrl-C in the middle: a short word, exit code 130, no process, no folder."""
    before = ray_folders()
    demo = start_demo(tmp_path, "--samples", "4000")
    wait_until(lambda: list(tmp_path.glob("raycheck-demo/gpt-*/reference/rank0-*")), "the first worker", 600)
    mine = ray_folders() - before
    assert left_over(mine)
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=300)
    assert demo.returncode == 130, output
    assert "interrupted" in output
    assert not ray_folders() & mine
    assert not left_over(mine)
