"""Everything raycheck raises, grouped by what the caller should do next.

    RaycheckError
    ├── ConfigError          fix the settings (also a ValueError)
    ├── NotEnabledError      add AutoCheckpoint to the run (also a RuntimeError)
    ├── StateError           fix what is passed to attach() (also a TypeError)
    ├── StorageError         retry, or fix the store (also an OSError)
    │   ├── ObjectNotFoundError   the object is not there (also a FileNotFoundError)
    │   └── StoragePermissionError   fix the credentials (also a PermissionError)
    ├── CheckpointError      this checkpoint cannot be used: restore an older one
    │   ├── CorruptCheckpointError   bytes differ from what was committed
    │   ├── CheckpointMismatchError  it belongs to another model, data set or seed
    │   └── CheckpointNotFoundError  the step asked for does not exist
    ├── SaveError            saving failed too often in a row; the previous checkpoint stays
    └── FencedError          stop: a newer start of this run has taken over

Every error survives pickling, since it crosses processes, and carries the
facts of its message as attributes.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CorruptCheckpointError",
    "FencedError",
    "NotEnabledError",
    "ObjectNotFoundError",
    "RaycheckError",
    "SaveError",
    "StateError",
    "StorageError",
    "StoragePermissionError",
]


class RaycheckError(Exception):
    """Root of all errors of raycheck.

    Args:
        message: What happened, to which step, rank and key, and what to do.
        **facts: The same facts for programs; readable as attributes.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        # Only called for names that are not set. ``facts`` itself is missing
        # while an instance is being unpickled.
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self), self.facts))


def _rebuild(cls: type[RaycheckError], message: str, facts: dict[str, Any]) -> RaycheckError:
    error = cls.__new__(cls)
    # OSError fills errno from its arguments in __new__: set the message alone.
    Exception.__init__(error, message)
    error.facts = facts
    return error


class ConfigError(RaycheckError, ValueError):
    """A setting is wrong. Attributes: ``field``, ``value``."""


class NotEnabledError(RaycheckError, RuntimeError):
    """``attach`` was called in a run without ``AutoCheckpoint``. No attributes."""


class StateError(RaycheckError, TypeError):
    """Part of the state cannot be saved or does not fit. Attribute: ``key``, its path."""


class StorageError(RaycheckError, OSError):
    """A storage operation failed after all retries. Attributes where they are known: ``key``, ``operation``."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """The object does not exist. Never retried."""


class StoragePermissionError(StorageError, PermissionError):
    """The store refused the credentials. Attributes: ``key``, ``operation``."""


class CheckpointError(RaycheckError):
    """A checkpoint cannot be used. Attributes where they are known: ``step``, ``key``."""


class CorruptCheckpointError(CheckpointError):
    """Stored bytes are missing or differ from the committed checksum. Attributes as of `CheckpointError`."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint belongs to another model, data set or seed; nothing of it was loaded.

    Attributes where they are known: ``problems``, one line for each difference, or ``field``.
    """


class CheckpointNotFoundError(CheckpointError, LookupError):
    """The step asked for does not exist. Attribute: ``available``, the steps that do."""


class SaveError(RaycheckError):
    """Saving failed more often in a row than ``on_failure`` tolerates. Its message has the last cause."""


class FencedError(RaycheckError):
    """A newer generation of this run exists: another start of it has taken over. Its message names both."""
