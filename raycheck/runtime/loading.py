"""``raycheck.load``: a checkpoint outside of training. No Ray is needed, and none is started."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from raycheck.core.assembly import place, whole_chunks
from raycheck.core.layout import Chunk, Entry, Manifest, checkpoint_prefix
from raycheck.core.plan import Read
from raycheck.errors import CheckpointMismatchError, ConfigError, CorruptCheckpointError
from raycheck.runtime.finding import find_checkpoint
from raycheck.state.codec import Codec
from raycheck.state.parts import SavedTensor
from raycheck.state.restore import Restorer
from raycheck.state.rng import capture_rng, restore_rng
from raycheck.state.segment import Segment
from raycheck.state.tree import StateTree
from raycheck.store.assemble import assemble, read_values
from raycheck.store.download import download
from raycheck.store.run import RunStore
from raycheck.store.spans import Read as SourceRead

_NOT_STATE = ("rng", "values")
_TIES = "*ties"
_ALIGN_BYTES = 64
_PARALLEL = 4


def load(
    checkpoint: Any,
    *,
    into: Mapping[str, Any] | None = None,
    step: int | None = None,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: tuple[type, ...] = (),
) -> dict[str, Any]:
    """Read a checkpoint: for evaluation, serving, or a look.

    Every byte that is read is verified before anything of ``into`` changes. No
    code of the checkpoint runs. Blocks until it is read; one call at a time in a
    process, from any thread. Random generators are left as they are; of what
    each rank had for itself, rank 0's is taken.

    Args:
        checkpoint: A ``ray.train.Checkpoint``; the path or URL of a run, whose
            newest usable checkpoint is meant; or that of one checkpoint's folder.
        into: Live objects by the names that they had in ``attach()``, such as
            ``{"model": model}``; what is not named is not read. None: return
            tensors.
        step: Of a run, the checkpoint of this step.
        strict: Refuse a checkpoint that does not hold exactly what ``into``
            names. False: take what fits.
        rename: Names in the checkpoint that have another name now, as in ``attach()``.
        storage_options: Options of the fsspec file system. None: those of the
            URL or of the checkpoint's own file system.
        allow_pickle: Types that may be read with pickle; as in `Settings`.

    Returns:
        ``into`` with plain values replaced by those that were read. Without
        ``into``, all tensors by name, on the CPU, such as
        ``"model.layer.weight"``; they share memory that is freed with the last.

    Raises:
        ConfigError: If an argument is wrong, or there is no run or checkpoint.
        CheckpointNotFoundError: If the run has no checkpoint, or none of this step.
        CheckpointMismatchError: If it is another model's; lists what differs.
        CorruptCheckpointError: If something is missing or differs from its checksum.
        StateError: If something in ``into`` is of no kind that can be restored.
        StorageError: If the store cannot be read.
    """
    _check_arguments(into, step)
    run_store, ref = find_checkpoint(checkpoint, step=step, options=storage_options)
    manifest = run_store.read_manifest(ref)
    entries = run_store.read_layout(manifest)
    if into is None:
        if rename or not strict:
            raise ConfigError(
                "strict and rename are for objects; give them with into={...}", field="into", value=None
            )
        return _read_tensors(run_store, manifest, entries)
    tree = _Chosen(into, strict=strict, rename=rename)
    with _arena() as segment, _generators_kept():
        _fill(tree, segment, run_store, manifest, entries, Codec(allow_pickle))
    return {**into, **tree.values}


def _check_arguments(into: object, step: object) -> None:
    if into is not None and not isinstance(into, Mapping):
        raise ConfigError(
            f"into is a {type(into).__qualname__}: must be a dict of live objects by the names they had in "
            'attach(), such as {"model": model}',
            field="into",
            value=type(into).__qualname__,
        )
    if step is not None and (type(step) is not int or step < 0):
        raise ConfigError(f"step={step!r}: must be a whole number from 0", field="step", value=step)


class _Chosen(StateTree):
    """Takes its own parts of a checkpoint and leaves the others alone."""

    def destinations(self, saved: Mapping[str, SavedTensor]) -> Any:
        return super().destinations({name: saved[name] for name in saved if self._has(name)})

    def check(self, values: Mapping[str, Any]) -> list[str]:
        return super().check({name: values[name] for name in values if self.wants(name)})

    def load(self, values: Mapping[str, Any], restored: Mapping[str, torch.Tensor]) -> None:
        super().load({name: values[name] for name in values if self.wants(name)}, restored)

    def _has(self, name: str) -> bool:
        part_now = self._rename(name).partition(".")[0]
        return any(part.name == part_now for part in self.parts)


def _fill(
    tree: StateTree,
    segment: Segment,
    run_store: RunStore,
    manifest: Manifest,
    entries: Sequence[Entry],
    codec: Codec,
) -> None:
    try:
        restorer = Restorer(
            tree,
            segment,
            entries,
            saved_world_size=manifest.world_size,
            rank=0,
            world_size=1,
            codec=codec,
            has_group=False,
        )
        _read(run_store, manifest, restorer.plan(), segment)
        restorer.check()
    except CheckpointMismatchError as error:
        raise _mismatch(manifest, error) from error
    restorer.load(())


def _read(run_store: RunStore, manifest: Manifest, reads: Sequence[Read], segment: Segment) -> None:
    """Read verified bytes into the arena."""
    by_rank: dict[int, list[SourceRead]] = {}
    for read in reads:
        by_rank.setdefault(read.rank, []).append(
            SourceRead(read.source, read.num_bytes, Segment.arena_offset + read.destination)
        )
    for rank, wanted in sorted(by_rank.items()):
        download(
            run_store.store,
            f"{checkpoint_prefix(manifest.ref)}/{manifest.shards[rank].name}",
            wanted,
            segment.fd,
            sums=run_store.read_sums(manifest, rank),
            parallel=_PARALLEL,
            cancelled=threading.Event(),
        )


def _mismatch(manifest: Manifest, error: CheckpointMismatchError) -> CheckpointMismatchError:
    problems = [
        text.replace("in attach()", "in into={...}") for text in error.facts.get("problems", [str(error)])
    ]
    shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
    return CheckpointMismatchError(
        f"the checkpoint of step {manifest.ref.step} does not fit into={{...}}; nothing was loaded:\n  {shown}\n"
        "load(..., strict=False) takes what fits, load(..., rename={old: new}) finds what has another name now",
        step=manifest.ref.step,
        problems=problems,
    )


def _read_tensors(run_store: RunStore, manifest: Manifest, entries: Sequence[Entry]) -> dict[str, Any]:
    chunks = [c for c in whole_chunks(entries, rank=0) if c.name.partition(".")[0] not in _NOT_STATE]
    placed, num_bytes = place(chunks, align_bytes=_ALIGN_BYTES)
    memory = os.memfd_create("raycheck-load", os.MFD_CLOEXEC)
    try:
        # An empty file cannot be mapped.
        os.truncate(memory, max(num_bytes, 1))
        assemble(run_store, manifest, entries, placed, memory, parallel=_PARALLEL)
        mapped = mmap.mmap(memory, max(num_bytes, 1))
    finally:
        os.close(memory)
    tensors = {chunk.name: _tensor(mapped, chunk, begin) for chunk, begin in placed}
    for tied, first in _ties(run_store, manifest, entries):
        if first in tensors:
            tensors.setdefault(tied, tensors[first])
    return tensors


def _tensor(mapped: mmap.mmap, chunk: Chunk, begin: int) -> torch.Tensor:
    dtype = getattr(torch, chunk.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"{chunk.name} is {chunk.dtype}, which this torch does not know")
    count = math.prod(chunk.shape)
    if count == 0:
        return torch.empty(chunk.shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin).view(chunk.shape)


def _ties(run_store: RunStore, manifest: Manifest, entries: Sequence[Entry]) -> Iterable[tuple[str, str]]:
    for coded in read_values(run_store, manifest, entries, rank=0).values():
        ties = coded.get(_TIES) if isinstance(coded, dict) else None
        if isinstance(ties, dict):
            yield from ties.items()


@contextlib.contextmanager
def _arena() -> Iterator[Segment]:
    segment = Segment()
    try:
        yield segment
    finally:
        segment.close()


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Undo what a restore does to this process's random generators: nothing is being continued here."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)
