"""Exports that torch writes: a .pt file, and a folder of torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from raycheck.cli.export_files import Assemble, open_to_write
from raycheck.core.assembly import place
from raycheck.core.selection import GROUPS, STATE, TIES, Selection, component_of, ties_of
from raycheck.errors import CorruptCheckpointError
from raycheck.state.codec import Codec

_ALIGN_BYTES = 64
_TENSOR_TAG = "tensor"


def write_pt(selection: Selection, path: Path, assemble: Assemble) -> list[str]:
    """Write a dict that ``torch.load(..., weights_only=True)`` reads.

    The tensors are put together in a file beside it first, which is mapped: the
    disk holds them twice for a while, memory does not.

    Returns:
        What was left out, and why.
    """
    with _state(selection, path.parent, assemble) as (state, left_out):
        torch.save(state, path)
        return left_out


def write_dcp(selection: Selection, folder: Path, assemble: Assemble) -> list[str]:
    """Write a checkpoint of torch.distributed.checkpoint; returns what was left out, and why.

    Tensors are whole in it, so any number of ranks and any sharding can load it.
    """
    with _state(selection, folder.parent, assemble) as (state, left_out):
        with warnings.catch_warnings():
            # It says that one process saves: that is so.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            save_distributed(state, storage_writer=FileSystemWriter(str(folder)), no_dist=True)
        return left_out


@contextlib.contextmanager
def _state(
    selection: Selection, scratch_folder: Path, assemble: Assemble
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the state as a training loop knows it, and what of it is left out."""
    with _tensors(selection, scratch_folder, assemble) as tensors:
        yield assemble_state(selection, tensors)


@contextlib.contextmanager
def _tensors(
    selection: Selection, scratch_folder: Path, assemble: Assemble
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors, by their names in the checkpoint, in a mapped file that has no name."""
    placed, num_bytes = place(selection.chunks, align_bytes=_ALIGN_BYTES)
    scratch = scratch_folder / f".raycheck-{os.getpid()}-{os.urandom(4).hex()}.scratch"
    with open_to_write(scratch, max(num_bytes, 1)) as descriptor:
        scratch.unlink()
        assemble(placed, descriptor)
        # Private, since torch wants memory that could be written to; nobody does.
        memory = mmap.mmap(descriptor, max(num_bytes, 1), mmap.MAP_PRIVATE)
        yield {
            chunk.name: _tensor_at(memory, begin, chunk.num_bytes, chunk.dtype, chunk.shape)
            for chunk, begin in placed
        }


def _tensor_at(
    memory: mmap.mmap, begin: int, num_bytes: int, dtype_name: str, shape: tuple[int, ...]
) -> torch.Tensor:
    dtype = getattr(torch, dtype_name, None) if re.fullmatch(r"[a-z0-9_]+", dtype_name) else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(
            f"the layout has the dtype {dtype_name!r}, which this torch does not know"
        )
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize, offset=begin)
    return flat.view(shape)


def assemble_state(
    selection: Selection, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Return the components as ``state_dict()`` would give them, and what is left out, with the reason.

    A module becomes a flat dict by parameter name, an optimizer a dict of
    "state" and "param_groups" by parameter name, as
    ``torch.distributed.checkpoint.state_dict`` has them. With one component
    asked for, its dict itself is returned.
    """
    left_out: list[str] = []
    state: dict[str, Any] = {}
    for name in selection.names:
        mine = {key: tensor for key, tensor in tensors.items() if component_of(key) == name}
        coded = selection.values.get(name)
        if isinstance(coded, dict) and GROUPS in coded:
            state[name] = _optimizer_state(name, coded, mine, left_out)
        elif set(mine) - _tensors_in(coded):
            state[name] = _module_state(name, coded, mine, left_out)
        else:
            value, is_whole = _decoded(name, coded, mine, left_out)
            if is_whole:
                state[name] = value
    if selection.is_bare:
        only = state.get(selection.names[0], {})
        return (only if isinstance(only, dict) else {selection.names[0]: only}), left_out
    return state, left_out


def _module_state(name: str, coded: Any, tensors: Mapping[str, torch.Tensor], left_out: list[str]) -> Any:
    if list(tensors) == [name]:
        return tensors[name]
    extra = coded if isinstance(coded, dict) else {}
    loose = {key: tensor for key, tensor in tensors.items() if key not in _tensors_in(coded)}
    state: dict[str, Any] = {key.removeprefix(f"{name}."): tensor for key, tensor in loose.items()}
    for tied, first in ties_of(coded).items():
        if first in loose:
            state[tied.removeprefix(f"{name}.")] = loose[first]
    for key, value in extra.items():
        if key != TIES:
            decoded, is_whole = _decoded(key, value, tensors, left_out)
            if is_whole:
                state[key.removeprefix(f"{name}.")] = decoded
    return state


def _optimizer_state(
    name: str, coded: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], left_out: list[str]
) -> dict[str, Any]:
    groups, is_whole = _decoded(f"{name} groups", coded[GROUPS], tensors, left_out)
    rest, _ = _decoded(f"{name} values", coded.get(STATE, {}), tensors, left_out)
    groups = groups if is_whole and isinstance(groups, list) else []
    prefix = _common_prefix([p for group in groups for p in group["params"]])
    state: dict[str, dict[str, Any]] = {}
    in_values = _tensors_in(coded)
    for key, tensor in tensors.items():
        if key not in in_values:
            parameter, _, field = key.removeprefix(f"{name}.").rpartition(".")
            state.setdefault(parameter.removeprefix(prefix), {})[field] = tensor
    for parameter, fields in (rest or {}).items():
        state.setdefault(parameter.removeprefix(prefix), {}).update(fields)
    for group in groups:
        group["params"] = [parameter.removeprefix(prefix) for parameter in group["params"]]
    return {"state": state, "param_groups": groups}


def _common_prefix(parameters: list[str]) -> str:
    """Return what the names of parameters begin with if they are all of one module: its own name."""
    modules = {component_of(parameter) for parameter in parameters}
    return f"{modules.pop()}." if len(modules) == 1 and all("." in p for p in parameters) else ""


def _tensors_in(coded: Any) -> set[str]:
    """Return the names of the tensors that stand inside coded values."""
    if isinstance(coded, list):
        return set().union(*map(_tensors_in, coded))
    if not isinstance(coded, dict):
        return set()
    if coded.get("!") == _TENSOR_TAG:
        return {str(coded.get("v"))}
    return set().union(*map(_tensors_in, coded.values()))


def _decoded(
    what: str, coded: Any, tensors: Mapping[str, torch.Tensor], left_out: list[str]
) -> tuple[Any, bool]:
    """Return a value, and whether it can be had without running code, now and when it is loaded."""
    try:
        text = json.dumps({"value": coded}).encode()
        value = Codec().loads(text, tensors)["value"]
        trial = Codec().loads(text, {name: torch.empty(0) for name in _tensors_in(coded)})
        buffer = io.BytesIO()
        torch.save(trial, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    # Whatever torch's restricted unpickler refuses it with.
    except Exception as error:  # noqa: BLE001
        left_out.append(f"{what}: {_reason(error)}")
        return None, False
    return value, True


def _reason(error: Exception) -> str:
    refused = re.search(r"GLOBAL ([\w.]+) was not an allowed global", str(error))
    if refused:
        return f"it holds a {refused[1]}, which torch.load(weights_only=True) refuses"
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
