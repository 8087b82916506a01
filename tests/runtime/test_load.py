"""raycheck.load: a checkpoint read anywhere, into live objects or as tensors."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from pyarrow.fs import LocalFileSystem
from ray.train import Checkpoint

import raycheck
from raycheck.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StateError,
)
from tests.runtime import jobs
from tests.runtime.harness import LocalCluster


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two ranks with checkpoints at 10 and 20, the last one registered; and how training ended."""
    folder = tmp_path_factory.mktemp("storage") / "run"
    cluster = LocalCluster(str(folder / "raycheck"), interval_steps=10**6)
    try:
        result = cluster.start(
            jobs.train, {"steps": 20, "save_at": [10], "step_s": 0}, world_size=2
        ).results()[0]
        cluster.coordinator.offer_last([])
    finally:
        cluster.close()
    return folder, result


@pytest.fixture
def run(made, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(made[0], tmp_path / "run")
    return tmp_path / "run", made[1]


def checkpoint_folder(run_folder, step):
    (found,) = run_folder.glob(f"raycheck/checkpoints/step-{step:010d}-*")
    return found


def build(width=32):
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))


def stored(folder, name):
    """Return a tensor whole, read by safetensors alone: its parts are cut along the first dimension."""
    parts = [safetensors.torch.load_file(path).get(name) for path in sorted(folder.glob("*.safetensors"))]
    return torch.cat([part for part in parts if part is not None])


def test_into_a_model_and_an_optimizer(made):
    """Bit for bit what training had; learning rate and counters too; nothing of this process changes else."""
    folder, result = made
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    loaded = raycheck.load(str(folder), into={"model": model, "optimizer": optimizer, "seen": 0})
    assert jobs.digest(model) == result["digest"]
    assert loaded["seen"] == 20
    assert loaded["model"] is model
    assert optimizer.param_groups[0]["lr"] == pytest.approx(result["lr"])
    state = optimizer.state[model[0].weight]
    assert state["step"] == 20
    assert torch.equal(
        state["exp_avg"], stored(checkpoint_folder(folder, 20), "optimizer.model.0.weight.exp_avg")
    )
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("step", [10, 20])
def test_as_tensors_by_name(made, step):
    """Without objects: all tensors, whole, on the CPU, as safetensors reads them from the shards."""
    folder, _ = made
    tensors = raycheck.load(folder, step=step)
    assert {name for name in tensors if name.startswith("model.")} == {
        f"model.{name}" for name in build().state_dict()
    }
    for name in ("model.0.weight", "optimizer.model.2.weight.exp_avg_sq"):
        assert torch.equal(tensors[name], stored(checkpoint_folder(folder, step), name))


def test_a_checkpoint_of_ray_train_wherever_it_is_taken(made, tmp_path):
    """In the run, as Ray Train hands it out, and copied elsewhere, where safetensors opens its files too."""
    folder, result = made
    checkpoint = Checkpoint(str(checkpoint_folder(folder, 20)), LocalFileSystem())
    copied = checkpoint.to_directory(str(tmp_path / "elsewhere"))
    with checkpoint.as_directory() as directory:
        for place in (checkpoint, directory, Path(copied), f"file://{copied}"):
            model = build()
            raycheck.load(place, into={"model": model})
            assert jobs.digest(model) == result["digest"]
        with safetensors.safe_open(next(Path(directory).glob("*.safetensors")), "pt") as opened:
            assert any(name.startswith("model.") for name in opened.keys())  # noqa: SIM118  no mapping


def test_from_s3_by_a_url_of_rays_kind(made, s3_url, s3_server):
    """The endpoint in the URL's query, credentials in options."""
    folder, result = made
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{s3_url.prefix}/run/{path.relative_to(folder)}"
            s3_url.client.put_object(Bucket=s3_url.bucket, Key=key, Body=path.read_bytes())
    endpoint = s3_server.endpoint.removeprefix("http://")
    options = {"key": s3_server.access_key, "secret": s3_server.secret_key}
    name = checkpoint_folder(folder, 20).name
    for path in ("run", f"run/raycheck/checkpoints/{name}"):
        model = build()
        url = f"{s3_url.url}/{path}?endpoint_override={endpoint}&scheme=http"
        raycheck.load(url, into={"model": model}, storage_options=options)
        assert jobs.digest(model) == result["digest"]


def test_ray_is_not_imported(made):
    """Serving and notebooks need no Ray; no process of it is started."""
    code = (
        "import sys, raycheck; tensors = raycheck.load(sys.argv[1]); "
        "assert 'ray' not in sys.modules; print(len(tensors))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, made[0]], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4


def test_what_does_not_fit_changes_nothing(made):
    """All differences in one error; strict=False takes what fits, rename follows names."""
    folder, result = made
    other = build()
    untouched = jobs.digest(other)
    with pytest.raises(CheckpointMismatchError, match=r"load\(\.\.\., rename") as error:
        raycheck.load(folder, into={"net": other})
    assert "attach" not in str(error.value)
    assert jobs.digest(other) == untouched
    raycheck.load(folder, into={"net": other}, rename={"model": "net"})
    assert jobs.digest(other) == result["digest"]
    with pytest.raises(CheckpointMismatchError, match=r"0\.weight"):
        raycheck.load(folder, into={"model": build(width=16)}, strict=False)


def test_a_damaged_byte_is_found_before_anything_changes(run):
    """Checksums are verified whatever is read."""
    folder, _ = run
    for shard in checkpoint_folder(folder, 20).glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)
    model = build()
    before = jobs.digest(model)
    for into in ({"model": model}, None):
        with pytest.raises(CorruptCheckpointError, match="shard-0000"):
            raycheck.load(folder, into=into)
    assert jobs.digest(model) == before


def test_a_folder_without_its_layout_says_so(run, tmp_path):
    """One that was never registered lacks the copy: the run's folder has it."""
    folder, _ = run
    alone = shutil.copytree(checkpoint_folder(folder, 10), tmp_path / "alone")
    with pytest.raises(CorruptCheckpointError, match="layout"):
        raycheck.load(alone)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"checkpoint": 7}, ConfigError, "checkpoint is a int"),
        ({"checkpoint": "/nowhere/at/all"}, ConfigError, "neither a run"),
        ({"step": 15}, CheckpointNotFoundError, "available steps: 10, 20"),
        ({"step": "20"}, ConfigError, "step='20'"),
        ({"into": torch.nn.Linear(1, 1)}, ConfigError, "into is a Linear"),
        ({"into": {"model": object()}}, StateError, "model is a object"),
        ({"rename": {"a": "b"}}, ConfigError, "into="),
    ],
)
def test_wrong_arguments_are_named(made, arguments, error, text):
    """What is wrong and what to give instead."""
    with pytest.raises(error, match=text):
        raycheck.load(**{"checkpoint": made[0], **arguments})
