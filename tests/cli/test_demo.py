"""The demo's own reading of what its job wrote, with a planned job in place of Ray's."""

import subprocess
import sys

from rich.console import Console
from rich.progress import Progress

from raycheck.cli import demo

JOB = """
import json, pathlib, sys, time
folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def write(rank):
    with (folder / f"rank{rank}-1.jsonl").open("a") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"event": "step", "step": step, "unix_s": time.time()}) + "\\n")
write(0)
while not (folder / "rank 0 was read").exists():
    time.sleep(0.01)
write(1)
"""


class Watched(demo.Records):
    """Records that let the job's other rank go on once the last step of rank 0 has been read."""

    last = 0

    def read(self) -> None:
        super().read()
        if self.last_step == self.last:
            (self.folder / "rank 0 was read").touch()


def test_a_rank_that_ends_after_rank_0_is_read_to_its_end(tmp_path, monkeypatch):
    """Rank 0's last line shows that the end is near; the others' lines may come after it."""
    monkeypatch.chdir(tmp_path)
    with demo._Demo(Console(quiet=True), tmp_path, str(tmp_path / "storage"), 400) as job:
        steps = job._num_steps
        (tmp_path / "records").mkdir()
        records = Watched(tmp_path / "records")
        records.last = steps
        job._driver = subprocess.Popen([sys.executable, "-c", JOB, records.folder, str(steps)])
        with Progress(console=Console(quiet=True)) as progress:
            job._finish(records, progress, progress.add_task("", total=steps))
    assert len(records.surviving()) == 2 * steps
