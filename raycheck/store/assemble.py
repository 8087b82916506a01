"""Whole tensors of a checkpoint, from its shards into a file: without torch, and nothing unverified."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from raycheck.core.assembly import Placed, in_batches, whole_chunks
from raycheck.core.layout import VALUES, Entry, Manifest, checkpoint_prefix
from raycheck.core.plan import plan_reads
from raycheck.errors import CorruptCheckpointError
from raycheck.store.download import download
from raycheck.store.run import RunStore
from raycheck.store.spans import Read

_MAX_READS = 200_000
"""Of one batch: some 50 MB of plans."""


def assemble(
    run_store: RunStore,
    manifest: Manifest,
    entries: Sequence[Entry],
    wanted: Sequence[Placed],
    destination: int,
    *,
    parallel: int = 4,
    cancelled: threading.Event | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Write boxes of tensors, whole and in row-major order, to their places in a file.

    Blocks until all are written. Memory is ``parallel`` times a window,
    whatever their size. If it raises, the file holds some of them.

    Args:
        run_store: Where from.
        manifest: Of the checkpoint.
        entries: Its layout, as `RunStore.read_layout` returns it.
        wanted: Boxes, and where the first byte of each goes.
        destination: A file descriptor.
        parallel: Requests at a time.
        cancelled: Set it to give up.
        on_progress: Called with numbers of bytes that were fetched, from several threads.

    Raises:
        TransferCancelledError: If ``cancelled`` was set.
        CorruptCheckpointError: If something is missing or differs from its checksum.
        StorageError: If the store cannot be read.
    """
    prefix = checkpoint_prefix(manifest.ref)
    for batch in in_batches(wanted, entries, max_reads=_MAX_READS):
        try:
            planned = plan_reads(batch, entries)
        except LookupError as error:
            raise CorruptCheckpointError(
                f"step {manifest.ref.step}: the layout lacks bytes of {error.args[0]!r}",
                step=manifest.ref.step,
            ) from error
        for rank, reads in itertools.groupby(planned, key=lambda read: read.rank):
            download(
                run_store.store,
                f"{prefix}/{manifest.shards[rank].name}",
                [Read(read.source, read.num_bytes, read.destination) for read in reads],
                destination,
                sums=run_store.read_sums(manifest, rank),
                parallel=parallel,
                cancelled=cancelled or threading.Event(),
                on_progress=on_progress,
            )


def read_values(
    run_store: RunStore, manifest: Manifest, entries: Sequence[Entry], *, rank: int
) -> dict[str, Any]:
    """Return the plain values that a rank saved, by component, as they are coded in JSON.

    Raises:
        CorruptCheckpointError: If they are missing or damaged.
        StorageError: If the store cannot be read.
    """
    step = manifest.ref.step
    chunk = next((chunk for chunk in whole_chunks(entries, rank=rank) if chunk.name == VALUES), None)
    if chunk is None:
        raise CorruptCheckpointError(f"step {step}: the layout has no values of rank {rank}", step=step)
    memory = os.memfd_create("raycheck-values", os.MFD_CLOEXEC)
    try:
        assemble(run_store, manifest, entries, [(chunk, 0)], memory)
        coded = json.loads(os.pread(memory, chunk.num_bytes, 0))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"step {step}: the values of rank {rank} are damaged: {str(error)[:300]}", step=step
        ) from error
    finally:
        os.close(memory)
    if not isinstance(coded, dict):
        raise CorruptCheckpointError(f"step {step}: the values of rank {rank} are no JSON object", step=step)
    return coded
