"""Carries out what the vote on a restore decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from raycheck.config import Settings
from raycheck.core import restore as voting
from raycheck.core.lineage import CheckpointRef
from raycheck.errors import StorageError
from raycheck.observe.events import EventLog
from raycheck.runtime import messages
from raycheck.runtime.generation import Generation
from raycheck.runtime.keeping import Keeping
from raycheck.runtime.reporting import Reporter
from raycheck.runtime.writing import Writer

logger = logging.getLogger("raycheck")


class RestoreRunner:
    """Used by the coordinator's thread; what blocks for storage runs in another.

    Args:
        settings: As the user chose them.
        writer: Writes the generation's record.
        keeping: Forgets what cannot be used.
        reporter: Tells what was restored.
        events: Where a rejection is noted.
        storage: Where slow calls run.
        decide: Has a function called in the coordinator's thread.
        tell_all: Sends an order to every agent. Thread-safe.
        on_open: Called once when the generation may commit.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        writer: Writer,
        keeping: Keeping,
        reporter: Reporter,
        events: EventLog,
        storage: Executor,
        decide: Callable[[Callable[[], None]], Any],
        tell_all: Callable[[messages.Order], None],
        on_open: Callable[[Generation], None],
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._keeping = keeping
        self._reporter = reporter
        self._events = events
        self._storage = storage
        self._decide = decide
        self._tell_all = tell_all
        self._on_open = on_open

    def carry_out(self, generation: Generation, actions: list[voting.Action]) -> None:
        """Do what the vote says, in order."""
        for action in actions:
            match action:
                case voting.Offer(ranks, ref):
                    self._tell_all(messages.OfferRestore(ranks, ref))
                case voting.Reject(ref, reason):
                    logger.warning("step %d cannot be restored, an older one is tried: %s", ref.step, reason)
                    self._keeping.forget(ref)
                    self._events.record("rejected", str(generation.id), step=ref.step, reason=reason)
                case voting.Refuse(message, is_mismatch):
                    self._tell_all(messages.RefuseRestore(message, is_mismatch))
                case voting.Proceed(ref):
                    self._storage.submit(self._write_record, generation, ref)

    def _write_record(self, generation: Generation, ref: CheckpointRef | None) -> None:
        if generation.commits is None:
            try:
                self._writer.record(generation, ref)
            except Exception as error:
                # Whatever it was: ranks that hear nothing would wait for ever.
                if not isinstance(error, StorageError):
                    logger.exception("the record of %s was not written", generation.id)
                self._tell_all(
                    messages.RefuseRestore(f"the generation's record cannot be written: {error}", False)
                )
                return
        # For the telemetry, which outlives it.
        accounts = self._writer.accounts_of(ref) if ref is not None and self._settings.telemetry else {}
        self._decide(lambda: self._open(generation, ref, accounts))

    def _open(self, generation: Generation, ref: CheckpointRef | None, accounts: dict[str, Any]) -> None:
        if generation.commits is None:
            generation.may_commit(ref, self._settings)
            self._keeping.go_on_from(ref)
            generation.untold_accounts = accounts
            self._on_open(generation)
            self._tell_if_all_have_loaded(generation)
        self._tell_all(messages.ProceedRestore(ref))

    def note(self, generation: Generation, ended: messages.RestoreEnded) -> None:
        """Take in that a rank has loaded. May be told twice, the second time without what it cost."""
        if ended.seconds is not None or ended.rank not in generation.loads:
            generation.loads[ended.rank] = ended
        self._tell_if_all_have_loaded(generation)

    def _tell_if_all_have_loaded(self, generation: Generation) -> None:
        accounts = generation.untold_accounts
        if accounts is None or len(generation.loads) < generation.world_size:
            return
        generation.untold_accounts = None
        self._reporter.restored(generation, accounts)
        # The parent's manifest will be rotated away: what it says of the data must not be lost with us.
        self._keeping.thread.submit(self._events.flush)
