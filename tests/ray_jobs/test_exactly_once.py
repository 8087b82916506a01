"""Every item once per epoch under Ray Train, whatever kills it, and what Ray's own data tools get told."""

import json

import pytest
import ray
import ray.data
import ray.train
import ray.train.torch
from typer.testing import CliRunner

import raycheck
from raycheck.cli import app
from raycheck.data import ray_data
from raycheck.data.adopt import adopt
from raycheck.errors import ConfigError
from tests.data import jobs as data_jobs
from tests.data import judge
from tests.ray_jobs import jobs


def train(config):
    """Run `tests.data.jobs.train` as a worker of Ray Train; see first what is refused here."""
    context = ray.train.get_context()
    place = {"rank": context.get_world_rank(), "world_size": context.get_world_size()}
    if place["world_size"] > 1:
        replaced = data_jobs.prepare(raycheck.DataLoader(data_jobs.Numbers(), 4, **place))
        with pytest.raises(ConfigError, match="prepare_data_loader has replaced it"):
            adopt({"loader": replaced}, **place)
    return data_jobs.train({**config, **place})


@pytest.mark.timeout(900)
def test_two_then_one_then_two_workers_with_kills_in_between(connected, tmp_path):
    """A loader prepared by Ray: the notes taken outside, the audit and the loss curve agree."""
    for number, num_workers in enumerate((2, 1, 2)):
        is_last = number == 2
        config = {} if is_last else {"save_at": [5 * number + 5], "pause_at": 5 * number + 7, "dies": True}
        trainer = jobs.trainer(
            tmp_path, train_loop=train, num_workers=num_workers, max_failures=0, kind="prepared",
            **config,
        )  # fmt: skip
        if is_last:
            trainer.fit()
        else:
            with pytest.raises(Exception, match=r"died|killed|failed|unexpectedly"):
                trainer.fit()
    run_folder = tmp_path / "run" / "raycheck"
    used = judge.counted(tmp_path, run_folder)
    assert {epoch: sorted(items.elements()) for epoch, items in used.items()} == {
        epoch: list(range(data_jobs.LENGTH)) for epoch in range(2)
    }
    losses = judge.losses(tmp_path, run_folder)
    straight = data_jobs.straight()["losses"]
    assert [losses[step] for step in sorted(losses)] == pytest.approx(straight, rel=1e-9)
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [generation["world_size"] for generation in report["generations"]] == [2, 1, 2]


def test_the_iterators_of_this_ray_have_no_position(connected):
    """Refused by ray_data() and by attach(), with the version and what to do; supported where they have a state."""
    iterator = ray.data.range(8).iterator()
    assert not hasattr(iterator, "state_dict"), "this Ray has it: test the real thing"
    for attach in (ray_data, lambda shard: adopt({"data": shard}, rank=0, world_size=1)):
        with pytest.raises(ConfigError, match=rf"installed Ray \({ray.__version__}\) have no state_dict"):
            attach(iterator)
