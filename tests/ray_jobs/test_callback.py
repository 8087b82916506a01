"""The callback's decisions, on Ray's own records but without a cluster."""

import types

import pytest
from ray.train import RunConfig
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller.state import RestartingState, RunningState
from ray.train.v2.api.exceptions import WorkerGroupError

import raycheck
from raycheck.errors import ConfigError
from raycheck.runtime import compat
from raycheck.runtime.callback import join_url


def context(**fields):
    return types.SimpleNamespace(**fields)


def test_a_run_without_a_name_is_told_from_one_with():
    """Ray makes a name up; such a run cannot be resumed by the same command."""
    assert compat.run_was_named(context(run_config=RunConfig(name="gpt")))
    assert not compat.run_was_named(context(run_config=RunConfig()))


def test_replica_groups_are_refused_with_the_reason():
    """TorchFT keeps survivors: ranks would not share one step."""
    backend = context(backend_cls=context(has_replica_groups=True))
    with pytest.raises(ConfigError, match="TorchFT"):
        raycheck.AutoCheckpoint().after_controller_start(context(backend_config=backend))


def test_one_death_outweighs_the_errors_of_its_peers():
    """A killed worker is a "worker" failure; the user's own exception is another kind."""
    died = WorkerHealthCheckFailedError("gone", failure=RuntimeError("actor died"))
    kinds = [
        compat.failure_kind(RestartingState(WorkerGroupError("x", failures)))
        for failures in ({0: RuntimeError("peer reset"), 1: died}, {0: ValueError("the user's")})
    ]
    assert kinds == ["worker", "exception"]
    assert compat.failure_kind(RunningState()) is None


def test_paths_and_urls_are_joined_before_a_query():
    """Ray writes an S3 endpoint into the URL's query."""
    assert join_url("/data/runs/", "x/raycheck") == "/data/runs/x/raycheck"
    assert join_url("s3://b/p", "x") == "s3://b/p/x"
    assert join_url("s3://b?scheme=http", "x") == "s3://b/x?scheme=http"
    assert join_url("/odd?name", "x") == "/odd?name/x"


def test_settings_from_the_environment_hold_only_without_arguments(monkeypatch):
    """Ray constructs a callback named in RAY_TRAIN_CALLBACKS without arguments."""
    monkeypatch.setenv("RAYCHECK_SETTINGS", '{"keep_last": 7}')
    assert raycheck.AutoCheckpoint().settings.keep_last == 7
    assert raycheck.AutoCheckpoint(max_overhead=0.1).settings.keep_last == 3
    with pytest.raises(ConfigError, match="max_overheads"):
        raycheck.AutoCheckpoint(max_overheads=0.1)
