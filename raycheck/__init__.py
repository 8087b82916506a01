"""raycheck: the Ray Train option that makes a job checkpoint itself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycheck.config import Settings
    from raycheck.data.loader import DataLoader
    from raycheck.data.sampler import ElasticBatchSampler, ElasticSampler
    from raycheck.errors import RaycheckError
    from raycheck.runtime.callback import AutoCheckpoint
    from raycheck.runtime.loading import load
    from raycheck.runtime.session import Restored
    from raycheck.runtime.worker import Checkpointer, attach

# Imported when they are first used: an agent's process needs no torch, the
# command line no Ray.
_HOMES = {
    "AutoCheckpoint": "raycheck.runtime.callback",
    "Checkpointer": "raycheck.runtime.worker",
    "DataLoader": "raycheck.data.loader",
    "ElasticBatchSampler": "raycheck.data.sampler",
    "ElasticSampler": "raycheck.data.sampler",
    "RaycheckError": "raycheck.errors",
    "Restored": "raycheck.runtime.session",
    "Settings": "raycheck.config",
    "attach": "raycheck.runtime.worker",
    "load": "raycheck.runtime.loading",
}

__all__ = [
    "AutoCheckpoint",
    "Checkpointer",
    "DataLoader",
    "ElasticBatchSampler",
    "ElasticSampler",
    "RaycheckError",
    "Restored",
    "Settings",
    "attach",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raycheck' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
