"""A shard is stored as soon as it is copied; what counts is the verdict before the next update."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import raycheck
from raycheck.core import layout
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster, wait_until


@pytest.fixture
def cluster(tmp_path):
    cluster = LocalCluster(f"{tmp_path}/run", interval_steps=5, keep_last=99, telemetry=False)
    yield cluster
    cluster.close()


def stored(cluster: LocalCluster, step: int) -> set[str]:
    """Names of what is stored of a step's attempts."""
    root = Path(cluster.url, "checkpoints")
    return {path.name for path in root.glob(f"step-{step:010d}-*/*") if not path.name.startswith(".")}


def train_and_stand(config: dict[str, Any]) -> bool:
    """Stand before the first update that a snapshot waits for; then change a parameter, or do not."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ckpt = raycheck.attach(model=model, optimizer=optimizer)
    has_stood = False
    for _ in range(config["steps"]):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        if ckpt._session._snapshotter.is_pending and not has_stood:
            has_stood = True
            Path(config["step_file"]).with_suffix(".new").write_text(str(ckpt.current_step))
            Path(config["step_file"]).with_suffix(".new").rename(config["step_file"])
            jobs.wait_for(config["go_file"])
            if config["changes"]:
                with torch.no_grad():
                    model.weight.add_(1.0)
        optimizer.step()
        time.sleep(0.01)  # a step
        ckpt.step()
    return has_stood


@pytest.mark.parametrize("changes", [False, True])
def test_a_shard_is_durable_before_the_verdict_that_makes_it_count(cluster, tmp_path, changes):
    """It is stored while the training thread stands before its update; a change by then, and it is deleted."""
    go, step_file = tmp_path / "go", tmp_path / "step"
    config = {"steps": 60, "step_file": str(step_file), "go_file": str(go), "changes": changes}
    generation = cluster.start(train_and_stand, config)
    wait_until(step_file.exists, "a snapshot")
    step = int(step_file.read_text())
    sums_name = layout.sums_name(layout.shard_name(0, 1))
    wait_until(lambda: sums_name in stored(cluster, step), f"the shard of step {step}")
    assert "manifest.json" not in stored(cluster, step)
    go.touch()
    assert generation.results() == [True]
    assert (step in cluster.committed_steps()) != changes
    if changes:
        wait_until(lambda: not stored(cluster, step), "the remains to go")
