"""What is to be said of a run's store, by code of its own.

The judge reads objects and nothing else of raycheck's: it parses the records
and follows their parents itself, reads the shards with `safetensors`, sums
their bytes with `crc32c`, and compares all tensors with those that the same
training has at that step without any checkpoint (`tests.reliability.training`).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import crc32c
import safetensors.torch
import torch

from raycheck.store.objects import Store
from tests.reliability.training import Expected, digest

_NUM_LOOKS = 6


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a store is at one moment."""

    newest: int
    """The newest step that counts and is whole; 0: none."""

    problems: list[str]
    """Manifests of incomplete or damaged steps, in words."""


class _GoneError(Exception):
    """Something that a manifest names is not there, or not as it says."""


def is_record(key: str) -> bool:
    """Whether a key is that of a generation's record."""
    return key.startswith("generations/") and key.count(".") == 1


def judge(store: Store, expected: Expected) -> Verdict:
    """Judge every manifest in the store, also of those that do not count.

    A run that goes on deletes old checkpoints, manifest first. Where one
    vanishes between our listing and our reading, newer ones have come: the
    store is looked at again.
    """
    newest = 0
    for _ in range(_NUM_LOOKS):
        verdict, num_vanished = _look(store, expected)
        newest = max(newest, verdict.newest)
        if not num_vanished or verdict.problems:
            break
    return Verdict(newest, verdict.problems)


def _look(store: Store, expected: Expected) -> tuple[Verdict, int]:
    objects = {info.key for info in store.list_keys()}
    limits = counted_steps([json.loads(store.get(key)) for key in sorted(objects) if is_record(key)])
    newest, problems, num_vanished = 0, [], 0
    for key in sorted(objects):
        if not key.endswith("/manifest.json"):
            continue
        try:
            manifest = json.loads(_get(store, key))
            tensors = _read(store, key.rpartition("/")[0], manifest)
        except _GoneError as error:
            if _exists(store, key):
                problems.append(f"{key} is there, and is incomplete or damaged: {error}")
            num_vanished += 1
            continue
        step = manifest["step"]
        if digest(tensors) != expected.at(step):
            problems.append(f"step {step} is not what it was: {key}")
        elif step <= limits.get(tuple(manifest["generation"]), -1):
            newest = max(newest, step)
    return Verdict(newest, problems), num_vanished


def _exists(store: Store, key: str) -> bool:
    try:
        store.size_bytes(key)
    except FileNotFoundError:
        return False
    return True


def counted_steps(records: list[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """Return up to which step each generation of the newest lineage counts."""
    by_generation = {tuple(record["generation"]): record for record in records}
    limits: dict[tuple[int, str], float] = {}
    if not by_generation:
        return limits
    at, limit = max(by_generation), float("inf")
    while True:
        limits[at] = limit
        parent = by_generation[at]["parent"]
        if parent is None:
            return limits
        limit = min(limit, parent[0])
        at = (parent[1], parent[2])


def _read(store: Store, folder: str, manifest: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that all ranks share."""
    _get(store, f"layouts/{manifest['layout']}.parquet")
    tensors: dict[str, torch.Tensor] = {}
    for _, name, num_bytes, _ in manifest["shards"]:
        data = _get(store, f"{folder}/{name}")
        if len(data) != num_bytes:
            raise _GoneError(f"{name} has {len(data)} bytes, not {num_bytes}")
        _check_sums(name, data, _get(store, f"{folder}/{name.removesuffix('.safetensors')}.sums"))
        for piece, tensor in safetensors.torch.load(data).items():
            if "@" not in piece:
                # A large one is cut along its first dimension, and the ranks hold its pieces in order.
                tensors[piece] = torch.cat([tensors[piece], tensor]) if piece in tensors else tensor
    return tensors


def _get(store: Store, key: str) -> bytes:
    try:
        return store.get(key)
    except FileNotFoundError as error:
        raise _GoneError(key) from error


def _check_sums(name: str, data: bytes, stored: bytes) -> None:
    """Compare the stored sums, CRC32C after a header of 24 bytes, with the bytes that they are over."""
    chunk_bytes = int.from_bytes(stored[8:16], "little")
    chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    sums = b"".join(crc32c.crc32c(chunk).to_bytes(4, "little") for chunk in chunks)
    if stored[24:] != sums:
        raise _GoneError(f"the sums of {name}")
