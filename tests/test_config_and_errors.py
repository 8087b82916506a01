"""Settings die early and say why; errors survive their way between processes."""

import inspect
import pickle

import pytest

from raycheck import errors
from raycheck.config import Settings, make_settings
from raycheck.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_overhead", 0),
        ("max_overhead", 1),
        ("max_overhead", float("nan")),
        ("max_overhead", "3%"),
        ("recovery_point_s", -1),
        ("recovery_point_s", float("inf")),
        ("interval_steps", 0),
        ("interval_steps", 1.5),
        ("interval_steps", True),
        ("gpu_days_per_failure", 0),
        ("restart_s", -1),
        ("on_conflict", "retry"),
        ("resume", "latest"),
        ("resume", -5),
        ("keep_last", 0),
        ("keep_every_steps", 0),
        ("keep_every_s", -1.0),
        ("on_failure", "raise"),
        ("storage_path", ""),
        ("storage_options", "key=1"),
        ("max_in_flight", 3),
        ("overlap", 1),
        ("upload_parallel_parts", 0),
        ("node_memory_bytes", -1),
        ("allow_pickle", ("MyState",)),
        ("telemetry", None),
        ("interval", 5),
    ],
)
def test_a_bad_setting_is_named_with_its_value(field, value):
    """One error: the field, what was given, what is allowed."""
    with pytest.raises(ConfigError, match=field) as error:
        make_settings({field: value})
    assert error.value.field == field
    assert repr(value) in str(error.value)


def test_fields_are_checked_against_each_other():
    """A minimum above the maximum is refused."""
    with pytest.raises(ConfigError, match="max_interval_s=5"):
        Settings(min_interval_s=10, max_interval_s=5)


def test_settings_from_the_environment():
    """RAYCHECK_SETTINGS is JSON, checked like keywords."""
    assert Settings.from_json('{"max_overhead": 0.02}').max_overhead == 0.02
    for text in ("{", "[]", '{"max_overheads": 1}'):
        with pytest.raises(ConfigError):
            Settings.from_json(text)


@pytest.mark.parametrize(
    "cls", [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
)
def test_every_error_survives_pickling(cls):
    """Message, type and facts are the same on the other side."""
    error = pickle.loads(pickle.dumps(cls("step 3 of rank 1", step=3, key="a/b")))
    assert type(error) is cls
    assert str(error) == "step 3 of rank 1"
    assert (error.step, error.key) == (3, "a/b")
    assert isinstance(error, errors.RaycheckError)
    with pytest.raises(AttributeError):
        error.rank  # noqa: B018
