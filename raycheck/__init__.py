"""raycheck: the Ray Train option that makes a job checkpoint itself."""

from raycheck.config import Settings
from raycheck.data.loader import DataLoader
from raycheck.data.sampler import ElasticBatchSampler, ElasticSampler
from raycheck.errors import RaycheckError
from raycheck.runtime.callback import AutoCheckpoint
from raycheck.runtime.worker import Checkpointer, Restored, attach

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
]
