"""Hands checkpoints over to Ray Train: the coordinator's side.

The controller tells again and again what Ray Train holds and gets offers; it
alone talks to Ray. A record in the store says what was offered, before it is:
a coordinator that is killed must not delete what Ray may hold. What Ray does
not hold, though a record says so, is ours again: either Ray was never told,
or it has let go.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from raycheck.core import layout
from raycheck.core.lineage import CheckpointRef
from raycheck.core.registration import along_the_way, at_the_end
from raycheck.errors import CheckpointError, StorageError
from raycheck.runtime.keeping import Keeping
from raycheck.store.run import RunStore

logger = logging.getLogger("raycheck")


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A checkpoint for Ray Train to take."""

    name: str
    """Of its folder below ``checkpoints/``."""

    metrics: dict[str, float]
    """The user's, at its step."""


class Registration:
    """Used by the coordinator's thread; storage is read and written in the one that deletes, in order.

    Args:
        run_store: The run's store.
        keeping: Which checkpoints there are; what is registered is taken out of its rotation.
        decide: Has a function called in the coordinator's thread.
        on_newest_gone: Called when Ray has deleted the newest checkpoint of the lineage.
    """

    def __init__(
        self,
        *,
        run_store: RunStore,
        keeping: Keeping,
        decide: Callable[[Callable[[], None]], Any],
        on_newest_gone: Callable[[], None],
    ) -> None:
        self._run_store = run_store
        self._keeping = keeping
        self._decide = decide
        self._on_newest_gone = on_newest_gone
        self._every_s: float | None = None
        self._last_unix_s: float | None = None
        self._preparing: CheckpointRef | None = None
        self._pending: tuple[CheckpointRef, Offer] | None = None
        self._was_offered = False

    def begin(self) -> None:
        """Read what is registered. Blocks for storage; raises `StorageError`."""
        registered = self._run_store.registered()
        self._keeping.registered = set(registered)
        times = (self._run_store.registered_facts(ref).get("created_unix_s") for ref in registered[-1:])
        self._last_unix_s = next((float(t) for t in times if isinstance(t, int | float)), None)

    def hear(self, held: Collection[str], every_s: float | None) -> Offer | None:
        """Take in what Ray Train holds, and return what it should be given.

        Args:
            held: Names of all our checkpoints that it has, at this moment.
            every_s: How often to register along the way; None: not at all.
        """
        self._every_s = every_s
        self._keeping.is_shared = True
        names = set(held)
        if self._pending is not None and (self._was_offered or self._pending[1].name in names):
            # Ray has it now, or did not take it: then it is taken back below.
            self._pending = None
        open_refs = {self._preparing, self._pending[0] if self._pending else None}
        for ref in sorted(self._keeping.registered - open_refs):
            if layout.checkpoint_name(ref) not in names:
                self._take_back(ref)
        # The first time it may be that the last commit is long past.
        self.consider()
        self._was_offered = self._pending is not None
        return self._pending[1] if self._pending else None

    def consider(self) -> None:
        """Choose what to register, after a commit and before retention looks. Never blocks."""
        if self._every_s is None or self._preparing or self._pending:
            return
        ref = along_the_way(
            self._keeping.committed,
            self._keeping.registered,
            created_unix_s=self._keeping.created_unix_s,
            last_unix_s=self._last_unix_s,
            every_s=self._every_s,
        )
        if ref is not None:
            self._prepare(ref)

    def offer_last(self, held: Collection[str]) -> Future[Offer | None]:
        """Offer the newest checkpoint, whatever the time, unless Ray has it. Nothing else is offered any more."""
        self.hear(held, None)
        self.hear(held, None)
        ref = at_the_end(self._keeping.committed, self._keeping.registered)
        if ref is not None:
            return self._prepare(ref)
        nothing: Future[Offer | None] = Future()
        nothing.set_result(None)
        return nothing

    def _prepare(self, ref: CheckpointRef) -> Future[Offer | None]:
        self._preparing = ref
        # At once: retention must not choose it while its record is being written.
        self._keeping.registered.add(ref)
        return self._keeping.thread.submit(self._write, ref)

    def _write(self, ref: CheckpointRef) -> Offer | None:
        try:
            manifest = self._run_store.read_manifest(ref)
            self._run_store.write_registered(manifest)
        except (CheckpointError, StorageError) as error:
            logger.warning("step %d could not be registered with Ray Train: %s", ref.step, error)
            self._decide(lambda: self._written(ref, None, None))
            return None
        offer = Offer(layout.checkpoint_name(ref), manifest.metrics)
        self._decide(lambda: self._written(ref, offer, manifest.created_unix_s))
        return offer

    def _written(self, ref: CheckpointRef, offer: Offer | None, created_unix_s: float | None) -> None:
        self._preparing = None
        if offer is None:
            # Its record may exist; the next start finds that Ray does not hold it.
            self._keeping.registered.discard(ref)
        else:
            self._pending = ref, offer
            self._last_unix_s = created_unix_s

    def _take_back(self, ref: CheckpointRef) -> None:
        self._keeping.registered.discard(ref)
        self._keeping.thread.submit(self._look_after, ref)

    def _look_after(self, ref: CheckpointRef) -> None:
        """See whether a checkpoint that Ray does not hold is still there."""
        try:
            self._run_store.delete_registered(ref)
            is_there = self._run_store.is_committed(ref)
        except StorageError as error:
            logger.warning("whether Ray Train has deleted step %d cannot be seen: %s", ref.step, error)
            return
        if not is_there:
            self._decide(lambda: self._gone(ref))

    def _gone(self, ref: CheckpointRef) -> None:
        is_newest = self._keeping.committed[-1:] == [ref]
        self._keeping.forget(ref)
        if is_newest:
            logger.warning("Ray Train has deleted step %d, the newest checkpoint: another is due", ref.step)
            self._on_newest_gone()
