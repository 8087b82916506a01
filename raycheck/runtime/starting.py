"""What a start reads from the store: what may be restored, what earlier starts have seen.

Functions over a `RunStore`; all of them block for storage and raise
`StorageError`. The coordinator calls them, in whatever thread may wait.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from typing import Any

from raycheck.config import Settings
from raycheck.core import layout, lineage
from raycheck.core import restore as voting
from raycheck.core.failure_rate import FailureRate
from raycheck.core.interval import DAY_S
from raycheck.core.lineage import CheckpointRef, GenerationId, GenerationRecord
from raycheck.errors import CheckpointError
from raycheck.runtime import messages
from raycheck.runtime.generation import Generation
from raycheck.store.run import RunStore

logger = logging.getLogger("raycheck")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The run as a start finds it."""

    tip: GenerationRecord | None
    usable: list[CheckpointRef]
    """Those that count and have a manifest, newest first."""

    candidates: list[CheckpointRef]
    """What may be restored, best first; empty for a fresh start."""


def find(run_store: RunStore, resume: int | str) -> Found:
    """Look at what the run holds.

    Raises:
        CheckpointNotFoundError: If the step to resume from does not exist.
        CheckpointError: If a run that has been further would start at step 0 unasked.
    """
    tip = lineage.tip(run_store.records())
    usable = []
    attempts = run_store.attempts()
    for ref in lineage.selectable(tip, attempts):
        if run_store.is_committed(ref):
            usable.append(ref)
        else:
            logger.warning("step %d is incomplete, it has no manifest: left out", ref.step)
    if resume == "auto" and not usable:
        _check_nothing_is_lost(run_store, tip, attempts)
    return Found(tip, usable, lineage.candidates(resume, usable))


def _check_nothing_is_lost(
    run_store: RunStore, tip: GenerationRecord | None, attempts: list[CheckpointRef]
) -> None:
    """Refuse to start at step 0 what has been further, unless the user says so."""
    if tip is not None and tip.parent is not None:
        raise CheckpointError(
            f"generation {tip.generation} of this run restored step {tip.parent.step}, but no checkpoint of "
            'its lineage is left in the store; put them back, or set resume="fresh" to start at step 0',
            step=tip.parent.step,
        )
    if tip is None and any(map(run_store.is_committed, attempts)):
        raise CheckpointError(
            f"{run_store.store.url} holds checkpoints but no record in {layout.GENERATIONS}/ that says "
            "which of them count; if they were copied, copy that folder as well, or set "
            'resume="fresh" to start at step 0'
        )


def claim(
    run_store: RunStore, *, world_size: int, failure_rate: FailureRate, resume: int | str
) -> GenerationId:
    """Write the claim of a generation that is about to start and return it."""
    return run_store.claim(
        {
            "claimed_unix_s": time.time(),
            "world_size": world_size,
            "host": socket.gethostname(),
            "failure_rate": failure_rate.to_dict(),
            # For a coordinator that has to take over before the restore is over.
            "resume": resume,
        }
    )


def recall_failure_rate(run_store: RunStore, otherwise: FailureRate) -> FailureRate:
    """Return what earlier jobs of this run have seen of failures, the last one's own end included."""
    claims = run_store.claims()
    if not claims:
        return otherwise
    last = claims[-1]
    facts, end = run_store.claim_facts(last), run_store.end_facts(last)
    try:
        if end is not None:
            return FailureRate.from_dict(end["failure_rate"])
        # It failed, and ran at least until its last checkpoint.
        seen_s = [
            run_store.read_manifest(ref).created_unix_s
            for ref in run_store.attempts()
            if ref.generation == last and run_store.is_committed(ref)
        ]
        ran_s = max(max(seen_s, default=0.0) - facts["claimed_unix_s"], 0.0)
        return FailureRate.from_dict(facts["failure_rate"]).after(
            gpu_days=ran_s * facts["world_size"] / DAY_S, failures={"worker": 1}
        )
    except (KeyError, TypeError, ValueError, OverflowError, CheckpointError) as error:
        logger.warning("the failure rate of earlier starts cannot be read and starts anew: %s", error)
        return otherwise


def claimed_failure_rate(
    run_store: RunStore, generation: GenerationId, otherwise: FailureRate
) -> FailureRate:
    """Return what was known of failures when a generation made its claim."""
    try:
        return FailureRate.from_dict(run_store.claim_facts(generation)["failure_rate"])
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("the failure rate of %s cannot be read and starts anew: %s", generation, error)
        return otherwise


def take_up(
    run_store: RunStore, delivery: messages.Delivery, settings: Settings
) -> tuple[Generation, Found] | None:
    """Return the generation that an agent speaks of, for a coordinator that has restarted.

    None if the delivery does not say how many ranks there are.
    """
    here = [message for message in delivery.messages if isinstance(message, messages.RankHere)]
    if not here:
        return None
    world_size = here[0].world_size
    records = run_store.records()
    mine = next((record for record in records if record.generation == delivery.generation), None)
    resume: Any = run_store.claim_facts(delivery.generation).get("resume", "auto")
    found = find(run_store, "auto" if mine else resume)
    if mine is not None:
        # Every rank had verified it before the record was written; some may be training already.
        vote = voting.RestoreVote.decided(mine.parent, world_size=world_size)
    else:
        vote = voting.RestoreVote(
            world_size=world_size, candidates=found.candidates, is_exact=isinstance(resume, int)
        )
    generation = Generation(delivery.generation, world_size, found.tip, vote)
    if mine is not None:
        generation.may_commit(mine.parent, settings)
    return generation, found
