"""What a target is, and what several of them need."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import pickle
import shutil
import tempfile
import types
from collections.abc import Callable
from typing import Any

from raycheck.core import layout
from raycheck.core.layout import Manifest, ShardInfo
from raycheck.core.lineage import CheckpointRef, GenerationId
from tests.fuzz.mutate import Mutator, words

GENERATION = GenerationId(3, "0a1b2c3d")
REF = CheckpointRef(1200, GENERATION, 12)
OLDER = CheckpointRef(1100, GenerationId(2, "00ff00ff"), 3)

JSON_NUMBERS = [
    *words('0 1 -1 true false null 1.0 NaN Infinity 1e400 "1" [] {} 9007199254740993 9223372036854775807'),
    *(b"9223372036854775808", b"1" + b"0" * 400, b"9" * 4300, b"9" * 4400),
]


@dataclasses.dataclass(frozen=True)
class Target:
    """One parser with its seeds."""

    name: str
    mutator: Mutator
    parse: Callable[[bytes], bool]
    """Returns whether the input was accepted; False: refused with a documented error."""

    settle: Callable[[], None] = lambda: None
    """Called now and then, to see what single inputs do not show: descriptors that leak, threads that died."""


@functools.cache
def bomb_file() -> str:
    """Where a payload would leave a folder if it ran."""
    folder = tempfile.mkdtemp(prefix="raycheck-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return os.path.join(folder, "executed")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (bomb_file(),))


def bomb() -> bytes:
    """Return a pickle that shows that it was loaded."""
    return pickle.dumps(Bomb())


class OneObject:
    """A store in which every key holds the same bytes; listings are given."""

    def __init__(self, names: dict[str, list[str]]) -> None:
        self.data = b""
        self._names = names

    def get(self, key: str) -> bytes:
        return self.data

    def list_children(self, folder: str) -> list[str]:
        return self._names.get(folder, [])

    def list_keys(self, folder: str) -> list[Any]:
        return [types.SimpleNamespace(key=f"{folder}/{name}") for name in self._names[folder]]


def manifest(num_shards: int = 2, **fields: Any) -> Manifest:
    """Return a valid manifest."""
    shards = tuple(
        ShardInfo(rank, layout.shard_name(rank, num_shards), 8192, f"{rank:08x}")
        for rank in range(num_shards)
    )
    made = Manifest(REF, num_shards, "ab" * 16, shards, 1.7e9, "w1", {"loss": 2.0, "lr": 1e-3})
    return dataclasses.replace(made, **fields)


_PLAIN: dict[str, Any] = {"int": int, "str": str, "bool": bool, "float": (int, float)}


def check_types(value: Any) -> None:
    """Check the plain fields of a dataclass, and of those in it, against what they are declared as."""
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        kind, found = str(field.type), getattr(value, field.name)
        told = f"{type(value).__name__}.{field.name}={found!r}, not {kind}"
        if kind in _PLAIN:
            assert isinstance(found, _PLAIN[kind]), told
            assert (kind == "bool") == isinstance(found, bool), told
        elif kind.startswith("tuple[int"):
            assert type(found) is tuple, told
            assert all(type(item) is int for item in found), told
        elif kind.startswith("CheckpointRef") and found is not None:
            assert {type(found.step), type(found.plan_id), type(found.generation.number)} == {int}, told
            assert type(found.generation.id) is str, told
        elif type(found) is tuple:
            for item in found:
                check_types(item)
