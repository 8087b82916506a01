"""Benchmarks speak to parts of raycheck that have no stable interface: they must not rot unseen."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_checkpoint_costs():
    """Ours and the plainest peer, in small: both rows are there, and what they saved came back bit for bit."""
    table = run("benchmarks/checkpoint_cost.py", "--mib", 4, "--runs", 1, "--only", "raycheck", "torch.save")
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    assert rows["raycheck"].endswith("| yes |")
    assert rows["torch.save"].endswith("| yes |")


def test_where_the_stall_goes():
    """The parts of a plain and of a sharded state, in small; the parts are the whole but for moments."""
    for arguments in (["--ranks", 2], ["--sharded"]):
        table = run("-W", "ignore", "benchmarks/stall_parts.py", "--mib", 8, "--snapshots", 1, *arguments)
        cells = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
        medians = {cell[1].strip(): float(cell[2]) for cell in cells}
        whole = medians.pop("all")
        medians.pop("of which the sample that ranks compare", None)
        assert sum(medians.values()) <= whole + 0.05, "more than rounding"


def test_what_the_loader_costs():
    """Both places of the work, in small; the script checks that every item came once."""
    table = run(
        "-W", "ignore", "-m", "benchmarks.loader_overhead", "--pairs", 2, "--batches", 5, "--workers", 1
    )
    assert table.count("us: ") == 6
