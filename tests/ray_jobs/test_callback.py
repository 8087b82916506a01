"""The callback's decisions, on Ray's own records but without a cluster."""

import importlib
import logging
import subprocess
import sys
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


class TestAnotherRay:
    """A version that lacks something loses what hangs on it, and says so once; it does not fail."""

    @pytest.fixture
    def without(self, monkeypatch, caplog):
        found = importlib.import_module
        missing = set()

        def look(name):
            if name in missing:
                raise ImportError(f"no module named {name}")
            return found(name)

        def lose(*modules):
            missing.clear()
            missing.update(f"ray.train.v2._internal.{module}" for module in modules)
            compat._find.cache_clear()

        monkeypatch.setattr(compat.importlib, "import_module", look)
        monkeypatch.setattr(logging.getLogger("raycheck"), "propagate", True)
        yield lose
        compat._find.cache_clear()

    def test_a_resize_is_not_recognised(self, without, caplog):
        """It goes on from the last checkpoint."""
        without("execution.controller.state")
        for _ in range(3):
            assert not compat.is_resizing(RunningState(), RunningState())
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2, "one for each of the two names"
        assert all("a resize loses the steps since the last checkpoint" in each for each in told)

    def test_nothing_is_registered(self, without, caplog):
        """Ray's list is not found, or looks different."""
        without("execution.training_report")
        assert compat.RayCheckpoints.of(context(_callbacks=[])) is None
        assert "checkpoints are not registered with Ray Train" in caplog.text
        compat._find.cache_clear()
        caplog.clear()
        without()
        assert compat.RayCheckpoints.of(context(_callbacks=[])) is None
        assert "hides its list of checkpoints (register_checkpoint)" in caplog.text

    def test_local_mode_and_the_end_of_training(self, without, caplog):
        """Neither is an error."""
        without("execution.train_fn_utils", "execution.context")
        assert not compat.is_local_run()
        compat.after_train_function(on_return=lambda: None, on_error=lambda: None)
        assert "call Checkpointer.close() at the end of the train function" in caplog.text

    def test_drains(self, monkeypatch, caplog):
        """Nothing is announced."""
        monkeypatch.setattr(logging.getLogger("raycheck"), "propagate", True)
        monkeypatch.delattr(type(compat.ray._private.state.state), "get_draining_nodes")
        compat._draining_nodes_call.cache_clear()
        assert compat.draining_nodes() == {}
        assert "does not say which nodes it drains" in caplog.text
        compat._draining_nodes_call.cache_clear()

    def test_without_callbacks_the_import_says_what_to_install(self):
        """There is nothing that raycheck could do there."""
        code = (
            "import ray.train, ray.train.v2._internal.execution.callback as callback\n"
            "del callback.WorkerCallback\n"
            "import raycheck.runtime.compat"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 1
        assert 'pip install "ray[train]>=' in done.stderr.splitlines()[-1]


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
