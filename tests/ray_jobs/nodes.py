"""Further nodes of a Ray cluster on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import ray

from tests.runtime.harness import wait_until

_START_S = 240.0


class Node:
    """A node with one place for a worker: ``resources_per_worker={"place": 1}``.

    Args:
        address: Of the head node; this process is connected to it.
        folder: Where its log goes.
        environment: Of its processes. None: this process's own.
    """

    def __init__(self, address: str, folder: Path, environment: dict[str, str] | None = None) -> None:
        before = {node["NodeID"] for node in ray.nodes()}
        self._log = Path(folder, f"node-{len(before)}.log").open("wb")  # noqa: SIM115  as long as it lives
        self.process = subprocess.Popen(
            [
                ray_program(), "start", f"--address={address}", "--block", "--num-cpus=1", "--num-gpus=0",
                '--resources={"place": 1}', "--object-store-memory=100000000", "--disable-usage-stats",
            ],
            env=environment, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        wait_until(lambda: alive() - before, "a further node", _START_S)
        (self.id,) = alive() - before

    @property
    def is_running(self) -> bool:
        """Whether its first process lives."""
        return self.process.poll() is None

    def terminate(self) -> None:
        """SIGTERM to ``ray start --block``, as the deletion of a pod sends it."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL all of its processes at once."""
        if self.is_running:
            family = [psutil.Process(self.process.pid)]
            family += family[0].children(recursive=True)
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=20)
        self.process.wait()
        self._log.close()


def drain(address: str, node: Node, *, deadline_s: int) -> None:
    """Have Ray announce that a node will be taken away."""
    subprocess.run(
        [
            ray_program(), "drain-node", f"--address={address}", f"--node-id={node.id}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot",
            f"--deadline-remaining-seconds={deadline_s}",
        ],
        env=os.environ, check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def ray_program() -> str:
    """Return the ``ray`` command of this installation."""
    return str(Path(sys.executable).with_name("ray"))


def alive() -> set[str]:
    """Return the ids of the nodes that Ray counts as alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
