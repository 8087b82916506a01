"""The settings of a run: one frozen record, validated when it is made."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from raycheck.errors import ConfigError

_OPTIONAL_INTS = ("interval_steps", "keep_every_steps", "node_memory_bytes")

OnConflict = Literal["bound", "recovery_point", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a user may choose. Every field has a default that suits most runs.

    Frozen, and checked when it is made: a wrong value ends the run before its
    first step. The interval is reckoned as ``docs/interval.md`` has it.

    Raises:
        ConfigError: If a field is wrong; names field, value and what it must be.
    """

    max_overhead: float = 0.035
    """Bound on the training time that checkpoints may cost, as a fraction of it, in (0, 1). The default is
    the bound that CheckFreq (Mohan et al., FAST 2021) was evaluated with."""

    recovery_point_s: float | None = None
    """Training time in seconds that a failure may cost at most, once there is a first checkpoint: interval
    plus persist. What gives way to what is in ``on_conflict``. None: no such limit."""

    min_interval_s: float | None = None
    """Never checkpoint more often than this, in seconds of training. None: no limit."""

    max_interval_s: float | None = None
    """Never checkpoint less often than this, in seconds of training. None: no limit."""

    interval_steps: int | None = None
    """A fixed interval in steps; switches tuning off. None: the interval is chosen online."""

    gpu_days_per_failure: float | str | Callable[[], float] = 3748.0
    """GPU-days between failures before this run has seen any of its own. A fleet's measured rate can
    be given as the path of a file that holds the number, or as a function that returns it; either is
    asked anew at each start of a worker group, on the node of the controller."""

    restart_s: float | None = None
    """Seconds from a failure to the first new step. None: measured from this run's own restarts."""

    on_conflict: OnConflict = "bound"
    """What wins when ``max_overhead`` and ``recovery_point_s`` cannot both hold. "error": refuse the run
    once its first checkpoint has shown what one costs."""

    resume: int | Literal["auto", "fresh"] = "auto"
    """"auto": newest usable checkpoint. "fresh": start at step 0. A number: exactly that step, or an
    error; what is newer is left behind."""

    keep_last: int = 3
    """How many checkpoints of this run to keep, at least 1."""

    keep_every_steps: int | None = None
    """Keep the first checkpoint at or after each multiple of this many steps for good. None: none."""

    keep_every_s: float | None = None
    """Keep the first checkpoint of each period of this many seconds for good. None: none."""

    register: bool = True
    """Make checkpoints known to Ray Train, as ``result.checkpoint`` and its like: the last one, and one of
    every ``register_every_s``. From then on they are Ray's to keep or delete, besides ``keep_last``, which
    counts as 2 at least."""

    register_every_s: float | None = None
    """How often, in seconds, one checkpoint is registered besides the last. None: every 600 s if
    ``CheckpointConfig(num_to_keep=...)`` limits how many Ray keeps, otherwise only the last."""

    on_failure: int | Literal["warn"] = "warn"
    """How many failed saves in a row are tolerated; one more, and ``ckpt.step()`` raises ``SaveError``.
    0: the first stops training. "warn": any number is logged."""

    sigterm_grace_s: float = 25.0
    """How long a worker that gets SIGTERM goes on, in seconds, so that its last steps are saved. Kubernetes
    kills after 30 unless it is told otherwise. 0: it ends at once."""

    resize_wait_s: float = 60.0
    """How long a resize may wait for a checkpoint, in seconds, so that no step is lost. 0: it does not."""

    storage_path: str | None = None
    """URL or path under which the run is stored. None: the run's own path in Ray Train."""

    storage_options: Mapping[str, Any] | None = None
    """Options of the fsspec file system, such as ``{"endpoint_url": ...}``. None: those of the run's own
    file system, or the usual places: environment, profiles, instance roles."""

    max_in_flight: int = 1
    """Snapshots that may be on their way to storage at a time, 1 or 2. 2: the next one is taken while the
    last is still being stored, and each rank takes twice the shared memory."""

    overlap: bool = True
    """Copy what only the optimizer changes while the next forward and backward run. False: copy all of it
    inside ``ckpt.step()``; for code that writes single elements of parameters outside ``optimizer.step()``."""

    upload_parallel_parts: int = 4
    """Parts of one shard that are uploaded at the same time, per worker, from 1 to 64."""

    upload_bytes_per_s: float | None = None
    """Upload limit per node in bytes per second. None: no limit."""

    agent_niceness: int = 5
    """How far uploads step back where training wants the processor as well: 0, not at all, to 19."""

    node_memory_bytes: int | None = None
    """Shared memory in bytes that snapshots may take on one node, shared evenly by its ranks. None: half of
    what the machine and the container's limit leave free when ``attach`` is called."""

    allow_pickle: tuple[type, ...] = ()
    """Types in the state that may be stored with pickle. Empty: nothing in a checkpoint can run code."""

    telemetry: bool = True
    """Store timings and decisions beside the checkpoints, for the report."""

    enabled: bool = True
    """False: ``attach`` does nothing, the loop runs as if raycheck were not there."""

    def __post_init__(self) -> None:
        _check_fraction(self, "max_overhead")
        for name in (
            "recovery_point_s",
            "min_interval_s",
            "max_interval_s",
            "upload_bytes_per_s",
            "keep_every_s",
            "register_every_s",
        ):
            _check_positive(self, name, optional=True)
        if not isinstance(self.gpu_days_per_failure, str) and not callable(self.gpu_days_per_failure):
            _check_positive(self, "gpu_days_per_failure")
        _check_positive(self, "restart_s", optional=True, zero=True)
        for name in ("sigterm_grace_s", "resize_wait_s"):
            _check_positive(self, name, zero=True)
        for name, low, high in (
            ("interval_steps", 1, None),
            ("keep_last", 1, None),
            ("keep_every_steps", 1, None),
            ("max_in_flight", 1, 2),
            ("upload_parallel_parts", 1, 64),
            ("agent_niceness", 0, 19),
            ("node_memory_bytes", 1, None),
        ):
            _check_int(self, name, low, high, optional=name in _OPTIONAL_INTS)
        if self.on_conflict not in get_args(OnConflict):
            _refuse("on_conflict", self.on_conflict, 'one of "bound", "recovery_point", "error"')
        _check_word_or_int(self, "resume", ("auto", "fresh"), low=0)
        _check_word_or_int(self, "on_failure", ("warn",), low=0)
        for name in ("overlap", "telemetry", "enabled", "register"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        if self.storage_path is not None and (
            not isinstance(self.storage_path, str) or not self.storage_path.strip()
        ):
            _refuse("storage_path", self.storage_path, 'a path or URL such as "s3://bucket/runs", or None')
        # A mypy-checked caller cannot get here with anything else; others can.
        options: object = self.storage_options
        if options is not None and not isinstance(options, Mapping):
            _refuse("storage_options", self.storage_options, "a dict of fsspec options, or None")
        if not isinstance(self.allow_pickle, tuple) or not all(
            isinstance(t, type) for t in self.allow_pickle
        ):
            _refuse("allow_pickle", self.allow_pickle, "a tuple of types, such as (MyState,)")
        if (
            self.min_interval_s is not None
            and self.max_interval_s is not None
            and self.min_interval_s > self.max_interval_s
        ):
            _refuse("min_interval_s", self.min_interval_s, f"at most max_interval_s={self.max_interval_s}")

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings written as a JSON object, as ``RAYCHECK_SETTINGS`` holds them.

        Raises:
            ConfigError: If it is not an object, or a field is unknown or wrong.
        """
        try:
            fields = json.loads(text)
        # Also a number of too many digits, or brackets without end.
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"RAYCHECK_SETTINGS is not valid JSON ({error}); "
                'write an object such as {"max_overhead": 0.02}',
                field="RAYCHECK_SETTINGS",
                value=text,
            ) from error
        if not isinstance(fields, dict):
            _refuse("RAYCHECK_SETTINGS", text, 'a JSON object such as {"max_overhead": 0.02}')
        return make_settings(fields)


def make_settings(fields: Mapping[str, Any]) -> Settings:
    """Return ``Settings(**fields)``, refusing unknown names with the list of known ones.

    Raises:
        ConfigError: If a field is unknown or wrong.
    """
    known = [field.name for field in dataclasses.fields(Settings)]
    for name, value in fields.items():
        if name not in known:
            _refuse(name, value, f"not a setting; the settings are {', '.join(known)}", known=known)
    return Settings(**fields)


def _refuse(field: str, value: object, allowed: str, **facts: Any) -> None:
    raise ConfigError(f"{field}={value!r}: must be {allowed}", field=field, value=value, **facts)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # A whole number beyond every float is none to reckon with either.
    return abs(value) <= sys.float_info.max


def _check_fraction(settings: Settings, name: str) -> None:
    value = getattr(settings, name)
    if not _is_number(value) or not 0 < value < 1:
        _refuse(name, value, "a fraction between 0 and 1, such as 0.035 for 3.5 %")


def _check_positive(settings: Settings, name: str, *, optional: bool = False, zero: bool = False) -> None:
    value = getattr(settings, name)
    if value is None and optional:
        return
    if not _is_number(value) or value < 0 or (value == 0 and not zero):
        least = "at least 0" if zero else "more than 0"
        _refuse(name, value, f"a number {least}" + (", or None" if optional else ""))


def _check_int(settings: Settings, name: str, low: int, high: int | None, *, optional: bool) -> None:
    value = getattr(settings, name)
    if value is None and optional:
        return
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        span = (
            f"a whole number from {low} to {high}" if high is not None else f"a whole number, at least {low}"
        )
        _refuse(name, value, span + (", or None" if optional else ""))


def _check_word_or_int(settings: Settings, name: str, words: tuple[str, ...], *, low: int) -> None:
    value = getattr(settings, name)
    if isinstance(value, str) and value in words:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        _refuse(name, value, " or ".join(f'"{word}"' for word in words) + f", or a whole number from {low}")
