"""Checkpoints of ours in Ray Train's own list."""

import asyncio
import json
import types
from concurrent.futures import Future
from pathlib import Path

import pytest
from ray.train import Checkpoint, CheckpointConfig, Result
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

import raycheck
from raycheck.config import Settings
from raycheck.runtime.compat import RayCheckpoints
from raycheck.runtime.registrar import Registrar
from raycheck.runtime.registration import Offer
from tests.ray_jobs import jobs


def steps_on_disk(folder):
    return sorted(int(path.parent.name[5:15]) for path in Path(folder, "run").rglob("manifest.json"))


def step_of(checkpoint):
    return json.loads(Path(checkpoint.path, "manifest.json").read_text())["step"]


def fit(folder, *, num_to_keep, **config):
    callback = raycheck.AutoCheckpoint(interval_steps=10**6, keep_last=1, register_every_s=1e-3)
    return jobs.trainer(
        folder, callbacks=[callback], train_loop=jobs.train_and_report, num_to_keep=num_to_keep, **config
    ).fit()


@pytest.mark.timeout(600)
def test_ray_train_has_our_checkpoints_through_restart_and_resubmission(connected, tmp_path):
    """result.checkpoint, best_checkpoints, get_checkpoint(), num_to_keep; the user's own reports go on."""
    result = fit(tmp_path, num_to_keep=2, steps=25, save_at=[5, 10, 15, 20], die_at=15)
    # Restarted at 15, with what Ray Train had been given then.
    assert result.return_value["first"] == 15
    assert "step-0000000010-" in result.return_value["found"]
    assert step_of(result.checkpoint) == 25
    assert result.metrics["step"] == 25
    assert result.metrics["loss"] == pytest.approx(1 / 25)
    assert [step_of(checkpoint) for checkpoint, _ in result.best_checkpoints] == [15, 25]
    assert steps_on_disk(tmp_path) == [15, 20, 25], "what Ray keeps, and the newest that is ours"

    again = fit(tmp_path, num_to_keep=1, steps=40, save_at=[30, 35])
    assert again.return_value["first"] == 25
    assert "step-0000000025-" in again.return_value["found"]
    assert [step_of(checkpoint) for checkpoint, _ in again.best_checkpoints] == [40]
    assert steps_on_disk(tmp_path)[-2:] == [35, 40]
    kept = Result.from_path(str(tmp_path / "run"))
    assert step_of(kept.checkpoint) == 40
    records = list(Path(tmp_path, "run", "raycheck", "registered").iterdir())
    assert [path.name[:15] for path in records] == ["step-0000000040"]


# Ray Train's own list without a cluster.


def checkpoints_in(folder, **config):
    context = StorageContext(str(folder), "run")
    manager = CheckpointManager(CheckpointConfig(**config), context)
    return manager, RayCheckpoints.of(types.SimpleNamespace(_callbacks=[object(), manager]))


def make(folder, step):
    path = f"raycheck/checkpoints/step-{step:010d}-g000001-ab-p000001"
    Path(folder, "run", path).mkdir(parents=True)
    Path(folder, "run", path, "manifest.json").write_text("{}")
    return path


def test_the_score_decides_which_are_kept_but_never_against_the_newest(tmp_path):
    """checkpoint_score_attribute orders ours by the user's metrics; Ray deletes the rest, folder and all."""

    async def run():
        manager, checkpoints = checkpoints_in(
            tmp_path, num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
        )
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, float("nan"))):
            checkpoints.register(make(tmp_path, step), {"loss": loss})
        assert manager._current_report_index == 0, "the workers' count of their reports is theirs"
        return checkpoints.names()

    assert len(asyncio.run(run())) == 3
    assert steps_on_disk(tmp_path) == [1, 2, 4]


def test_on_s3_ray_deletes_what_it_does_not_keep_and_nothing_beside_it(s3_url, s3_server, monkeypatch):
    """Whole folders of checkpoints that are ours, by Ray's own file system."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    endpoint = s3_server.endpoint.removeprefix("http://")
    folder = f"{s3_url.url}?endpoint_override={endpoint}&scheme=http"
    paths = [f"raycheck/checkpoints/step-{step:010d}-g000001-ab-p000001" for step in (1, 10, 100)]
    for path in paths:
        for name in ("shard-00000-of-00001.safetensors", "manifest.json"):
            s3_url.client.put_object(
                Bucket=s3_url.bucket, Key=f"{s3_url.prefix}/run/{path}/{name}", Body=b"x"
            )

    async def run():
        _, checkpoints = checkpoints_in(folder, num_to_keep=1)
        for path in paths[:2]:
            assert checkpoints.exists(path)
            checkpoints.register(path, {})
        return checkpoints.names()

    assert asyncio.run(run()) == [paths[1]]
    listed = s3_url.client.list_objects_v2(Bucket=s3_url.bucket, Prefix=f"{s3_url.prefix}/")["Contents"]
    found = {each["Key"].rpartition("/")[0].removeprefix(f"{s3_url.prefix}/run/") for each in listed}
    assert found & set(paths) == set(paths[1:])


class Handle:
    """Stands for the coordinator's handle: answers with offers and notes what it was told."""

    def __init__(self, *offers):
        self.offers = list(offers)
        self.told = []
        self.hear_registered = types.SimpleNamespace(remote=self._hear)

    def _hear(self, held, every_s):
        self.told.append((held, every_s))
        answer = Future()
        answer.set_result(self.offers.pop(0) if self.offers else None)
        return types.SimpleNamespace(future=lambda: answer)


def poll_all(manager, handle, **settings):
    registrar = Registrar(handle, Settings(**settings))
    registrar.begin(types.SimpleNamespace(_callbacks=[manager]))
    while handle.offers:
        registrar.poll()
    registrar.poll()


def test_nothing_is_registered_twice_or_that_is_not_there(tmp_path):
    """With num_to_keep=1 a second registration would delete what it registers."""

    async def run():
        manager, checkpoints = checkpoints_in(tmp_path, num_to_keep=1)
        name = Path(make(tmp_path, 1)).name
        handle = Handle(Offer(name, {"a": 1.0}), Offer(name, {"a": 1.0}), Offer("step-of-nobody", {}))
        poll_all(manager, handle)
        assert checkpoints.names() == [f"raycheck/checkpoints/{name}"]
        assert handle.told[0] == ([], 600.0)
        assert handle.told[-1] == ([name], 600.0)

    asyncio.run(run())
    assert steps_on_disk(tmp_path) == [1]


def test_a_user_who_reports_checkpoints_keeps_the_list_to_himself(tmp_path):
    """Code that reads back what it has reported must not find ours in its place."""

    async def run():
        manager, checkpoints = checkpoints_in(tmp_path)
        theirs = make(tmp_path, 1).replace("raycheck/checkpoints/step", "checkpoint")
        Path(tmp_path, "run", theirs).mkdir()
        folder = Checkpoint(str(tmp_path / "run" / theirs), manager._storage_context.storage_filesystem)
        manager.register_checkpoint(_TrainingReport(folder, {}, validation=False))
        handle = Handle(Offer(Path(make(tmp_path, 2)).name, {}))
        poll_all(manager, handle, register_every_s=1.0)
        assert checkpoints.names() == [theirs]
        assert handle.told[-1] == ([], None)

    asyncio.run(run())


def test_without_a_limit_of_rays_only_the_last_is_registered(tmp_path):
    """num_to_keep=None keeps all for good: no one asked for one every ten minutes."""

    async def run():
        manager, _ = checkpoints_in(tmp_path)
        handle = Handle()
        poll_all(manager, handle)
        assert handle.told == [([], None)]

    asyncio.run(run())
