"""Exports as safetensors files: one, or a set as Hugging Face names it. No torch here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from raycheck.core.assembly import Placed
from raycheck.core.layout import Chunk, shard_image
from raycheck.core.selection import Selection, in_files, refuse_unknown_dtypes
from raycheck.store.local import reserve

Assemble = Callable[[Sequence[Placed], int], None]
"""Writes boxes of tensors to their places in a file descriptor."""


def write_safetensors(selection: Selection, path: Path, assemble: Assemble) -> None:
    """Write one file with all tensors. Memory does not grow with their size.

    A tensor that has several names is there once; the header's metadata has its
    other names, as ``safetensors.torch.save_model`` writes them.
    """
    refuse_unknown_dtypes(selection.chunks)
    _write_file(selection, selection.chunks, path, assemble)


def write_hf(selection: Selection, folder: Path, assemble: Assemble, *, max_file_bytes: float) -> None:
    """Write ``model.safetensors``, or numbered files and the index that says which tensor is where."""
    refuse_unknown_dtypes(selection.chunks)
    files = in_files(selection.chunks, max_file_bytes=max_file_bytes)
    if len(files) == 1:
        _write_file(selection, files[0], folder / "model.safetensors", assemble)
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for name, chunks in zip(names, files, strict=True):
        _write_file(selection, chunks, folder / name, assemble)
    placed = {
        selection.name_of(chunk.name): name
        for name, chunks in zip(names, files, strict=True)
        for chunk in chunks
    }
    index = {"metadata": {"total_size": selection.num_bytes}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_file(selection: Selection, chunks: Sequence[Chunk], path: Path, assemble: Assemble) -> None:
    renamed = [dataclasses.replace(chunk, name=selection.name_of(chunk.name), owner=-1) for chunk in chunks]
    image = shard_image(renamed, rank=0)
    here = {chunk.name for chunk in renamed}
    ties = {tied: first for tied, first in selection.ties.items() if first in here}
    header = _with_metadata(image.header, {"format": "pt", **ties})
    shift = len(header) - len(image.header)
    placed = [(chunk, entry.begin + shift) for chunk, entry in zip(chunks, image.entries, strict=True)]
    with open_to_write(path, image.num_bytes + shift) as descriptor:
        os.pwrite(descriptor, header, 0)
        assemble(placed, descriptor)


def _with_metadata(header: bytes, metadata: dict[str, str]) -> bytes:
    """Return a safetensors header with other metadata; places in it count from its end."""
    table = json.loads(header[8:])
    table["__metadata__"] = metadata
    text = json.dumps(table, separators=(",", ":")).encode()
    num_bytes = len(text) + -len(text) % 8
    return num_bytes.to_bytes(8, "little") + text.ljust(num_bytes)


@contextlib.contextmanager
def open_to_write(path: Path, num_bytes: int) -> Iterator[int]:
    """Yield the descriptor of a new file of this size; a full disk shows at once.

    Raises:
        OSError: If it cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        reserve(descriptor, num_bytes)
        os.ftruncate(descriptor, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)
