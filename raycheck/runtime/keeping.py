"""Which checkpoints of the run are there, and the deletion of those that may go."""

from __future__ import annotations

import bisect
import functools
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raycheck.config import Settings
from raycheck.core import lineage
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.core.retention import to_delete
from raycheck.errors import CheckpointError, StorageError
from raycheck.observe.events import EventLog
from raycheck.store.run import RunStore

logger = logging.getLogger("raycheck")

_SWEEP_OLDER_THAN_S = 3600.0
"""Remains of generations that were cut off so long ago are nobody's."""


class Keeping:
    """Keeps count of the lineage's checkpoints and deletes in a thread of its own.

    Its state belongs to the coordinator's thread; deletion tells it the outcome there.

    Args:
        run_store: The run's store.
        settings: As the user chose them.
        events: Where a sweep is noted.
        decide: Has a function called in the coordinator's thread.
    """

    def __init__(
        self,
        *,
        run_store: RunStore,
        settings: Settings,
        events: EventLog,
        decide: Callable[[Callable[[], None]], Any],
    ) -> None:
        self._run_store = run_store
        self._settings = settings
        self._events = events
        self._decide = decide
        self.committed: list[CheckpointRef] = []
        """Oldest first. Those of the lineage alone: no other is ours to rotate."""

        self.registered: set[CheckpointRef] = set()
        """Those that Ray Train holds, or may hold: never ours to delete, of whatever lineage."""

        self.is_shared = False
        """Whether Ray Train takes checkpoints from here."""

        self.created_unix_s: dict[CheckpointRef, float] = {}
        """When checkpoints were committed; read from the store only where retention asks for it."""

        # Of its own, so that deleting never delays saving.
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raycheck-delete")

    def begin(self, usable: Iterable[CheckpointRef]) -> None:
        """Start from what a start has found. Blocks for storage if ``keep_every_s`` is set."""
        self.committed = sorted(usable)
        if self._settings.keep_every_s is not None:
            self._read_times()

    def _read_times(self) -> None:
        for ref in self.committed:
            if ref in self.created_unix_s:
                continue
            try:
                self.created_unix_s[ref] = self._run_store.read_manifest(ref).created_unix_s
            except (CheckpointError, StorageError) as error:
                logger.warning("step %d is kept: when it was committed cannot be read: %s", ref.step, error)

    def go_on_from(self, parent: CheckpointRef | None) -> None:
        """Leave behind what is newer than the parent: it is not this lineage's any more."""
        if parent is None:
            # A fresh start left the old checkpoints behind: they are not this lineage's to rotate.
            self.committed = []
        else:
            self.committed = [kept for kept in self.committed if kept <= parent]

    def note_time(self, ref: CheckpointRef, created_unix_s: float) -> None:
        """Remember when a checkpoint is committed."""
        self.created_unix_s[ref] = created_unix_s

    def add(self, ref: CheckpointRef) -> None:
        """Take in a new checkpoint, acknowledged."""
        # One that was begun later may have been committed first.
        bisect.insort(self.committed, ref)

    def forget(self, ref: CheckpointRef) -> None:
        """Take out one that is gone or cannot be used."""
        self.committed = [kept for kept in self.committed if kept != ref]
        self.created_unix_s.pop(ref, None)

    def rotate(self, generation_id: GenerationId) -> None:
        """Have what retention does not keep deleted; it counts those that are not registered."""
        # The newest may be registered next, and Ray may delete it: one more must stay behind it.
        least = 2 if self.is_shared else 1
        old = to_delete(
            [ref for ref in self.committed if ref not in self.registered],
            keep_last=max(self._settings.keep_last, least),
            keep_every_steps=self._settings.keep_every_steps,
            keep_every_s=self._settings.keep_every_s,
            created_unix_s=self.created_unix_s,
        )
        self.thread.submit(self._rotate, generation_id, old)

    def _rotate(self, generation_id: GenerationId, refs: list[CheckpointRef]) -> None:
        for ref in refs:
            try:
                # A newer generation may go back to any checkpoint that it finds: from its claim on they are its own.
                if lineage.newer_claim(generation_id, self._run_store.claims()) is not None:
                    return
                self._run_store.delete(ref)
            except StorageError as error:
                # Tried again after the next checkpoint; saving does not depend on it.
                logger.warning("the old checkpoint of step %d could not be deleted: %s", ref.step, error)
                return
            self._decide(functools.partial(self.forget, ref))

    def remove(self, ref: CheckpointRef) -> None:
        """Have what is durable of an attempt that nobody will commit deleted."""
        self.thread.submit(self._remove, ref)

    def _remove(self, ref: CheckpointRef) -> None:
        try:
            self._run_store.delete(ref)
        except StorageError as error:
            logger.warning(
                "what is left of step %d could not be deleted, a later start will: %s", ref.step, error
            )

    def sweep(self, generation_id: GenerationId) -> None:
        """Have what earlier generations left behind removed, once it is old enough to be nobody's."""
        self.thread.submit(self._sweep, generation_id)

    def _sweep(self, generation_id: GenerationId) -> None:
        try:
            swept = self._run_store.sweep(
                generation_id, older_than_s=_SWEEP_OLDER_THAN_S, now_unix_s=time.time()
            )
        except StorageError as error:
            logger.warning(
                "remains of earlier starts could not be removed, the next start tries again: %s", error
            )
            return
        if swept:
            self._events.record("swept", str(generation_id), keys=len(swept))
