"""What a generation writes: its record, its commits, its end. Blocks for storage; decides nothing."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from raycheck.core import layout, lineage, protocol
from raycheck.core.failure_rate import FailureRate
from raycheck.core.layout import Entry, Manifest
from raycheck.core.lineage import CheckpointRef, GenerationId
from raycheck.errors import CheckpointError, FencedError, StateError, StorageError
from raycheck.runtime.generation import Generation
from raycheck.store.run import RunStore

logger = logging.getLogger("raycheck")


class Writer:
    """Writes for one run. Called from the coordinator's storage threads."""

    def __init__(self, run_store: RunStore) -> None:
        self._run_store = run_store
        self._patient_store = run_store.patient()
        self._last_layout: tuple[tuple[Entry, ...], str] | None = None

    def record(self, generation: Generation, parent: CheckpointRef | None) -> None:
        """Write what a generation has restored. Waits for a store that does not answer.

        Raises:
            StorageError: If it could not be written; the generation may then commit nothing.
        """
        self._patient_store.write_record(
            lineage.record_for(
                generation.id, world_size=generation.world_size, parent=parent, tip_record=generation.tip
            )
        )

    def commit(
        self, generation: Generation, manifest: Manifest, tables: Mapping[int, tuple[Entry, ...]]
    ) -> protocol.CommitEnded:
        """Write layout and manifest, then look whether this generation was still the newest."""
        plan_id = manifest.ref.plan_id
        try:
            entries = tuple(entry for rank in range(generation.world_size) for entry in tables[rank])
            if self._last_layout is None or self._last_layout[0] != entries:
                problem = layout.uncovered(entries)
                if problem is not None:
                    raise StateError(f"step {manifest.ref.step} cannot be put together again: {problem}")
                self._last_layout = entries, self._run_store.write_layout(entries)
            self._run_store.write_manifest(dataclasses.replace(manifest, layout_digest=self._last_layout[1]))
            newer = lineage.newer_claim(generation.id, self._run_store.claims())
            if newer is not None:
                raise FencedError(
                    f"generation {generation.id} is cut off: {newer} of the same run has started since",
                    generation=generation.id,
                    newer=newer,
                )
        except FencedError as error:
            return protocol.CommitEnded(plan_id, str(error), is_fenced=True)
        except Exception as error:  # noqa: BLE001  whatever it was, the attempt must come to its end
            return protocol.CommitEnded(plan_id, str(error))
        return protocol.CommitEnded(plan_id)

    def end(self, generation_id: GenerationId, failure_rate: FailureRate) -> None:
        """Write that a generation has come to its normal end; that it could not be is worth a warning."""
        try:
            self._run_store.write_end(generation_id, {"failure_rate": failure_rate.to_dict()})
        except StorageError as error:
            logger.warning(
                "the end of %s could not be noted: the next start counts it as failed: %s",
                generation_id,
                error,
            )

    def accounts_of(self, ref: CheckpointRef) -> dict[str, Any]:
        """Return what a checkpoint says of the data; empty if it cannot be read."""
        try:
            return self._run_store.read_manifest(ref).accounts
        except (CheckpointError, StorageError) as error:
            logger.info("the accounts of step %d cannot be read again: %s", ref.step, error)
            return {}
