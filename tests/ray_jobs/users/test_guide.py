"""The program of docs/guide.md on S3: killed, given again, read back."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from raycheck.cli import app
from raycheck.store.objects import Store
from raycheck.store.run import RunStore
from tests.docs.guide import blocks, matches, sessions
from tests.runtime.harness import wait_until

WAIT_S = 240


@pytest.mark.timeout(900)
def test_the_guides_program_goes_on_after_a_kill_and_can_be_read(ray_head, s3_url, s3_server, tmp_path):
    """SIGKILL to the driver, the same command again; then each session and program that follows on the page."""
    (program,) = blocks("run as train.py")
    (tmp_path / "train.py").write_text(program.text)
    # The tests' Ray has another server's address in its environment than this one's, so it stands in the URL.
    storage = f"{s3_url.url}?endpoint_override={s3_server.endpoint.removeprefix('http://')}&scheme=http"

    def start(name):
        with (tmp_path / name).open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "train.py", storage],
                cwd=tmp_path,
                env={**os.environ, "RAY_ADDRESS": ray_head},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def begun(name):
        # Ray Train shows what a worker prints twice: as output, and from its log.
        return {int(step) for step in re.findall(r"begins at step (\d+)", (tmp_path / name).read_text())}

    run = RunStore(Store(f"{s3_url.url}/guide/raycheck", s3_url.options))
    committed = lambda: sorted(ref.step for ref in run.attempts() if run.is_committed(ref))  # noqa: E731
    first = start("first.log")
    try:
        wait_until(lambda: first.poll() is not None or committed(), "a checkpoint", WAIT_S)
        assert first.poll() is None, (tmp_path / "first.log").read_text()
        saved = committed()[-1]
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    second = start("second.log")
    try:
        assert second.wait(timeout=WAIT_S) == 0, (tmp_path / "second.log").read_text()
    finally:
        second.kill()
        second.wait()
    assert begun("first.log") == {0}
    (step,) = begun("second.log")
    assert step >= saved > 0
    assert re.search(r"^loss \d\.\d+: Checkpoint\(", (tmp_path / "second.log").read_text(), re.MULTILINE)
    check_what_follows(s3_url)


def check_what_follows(s3_url):
    """The sessions on the finished run, and the model read without Ray."""
    options = ["--storage-options", json.dumps(s3_url.options)]
    for command, expected in sessions("run in the run's store"):
        name, *arguments = shlex.split(command.replace("s3://runs/first", s3_url.url))
        assert name == "raycheck"
        done = CliRunner().invoke(app, [*arguments, *options])
        assert done.exit_code == 0, done.output
        assert matches(masked(expected), masked(done.output)), f"{command}\n{done.output}"
    (reader,) = blocks("run after train.py")
    text = reader.text.replace('"s3://runs/first/guide"', f'"{s3_url.url}/guide"')
    text = text.replace(
        'into={"model": network}', f'into={{"model": network}}, storage_options={s3_url.options!r}'
    )
    read = []
    for _ in range(2):
        names: dict = {}
        exec(compile(text, "docs/guide.md", "exec"), names)
        read.append(names["network"].state_dict())
    # Made at random each time, and alike once they are read.
    assert all(
        torch.equal(one, other) for one, other in zip(*(state.values() for state in read), strict=True)
    )


def masked(text):
    """Return a text without what differs from run to run."""
    text = re.sub(r"g\d{6}-[0-9a-f]{8}", "GENERATION", text)
    text = re.sub(r"\d[\d,.]*\s?(ms|s|min|h|days)\b", "TIME", text)
    return re.sub(r"\d[\d,.]*", "N", text)
