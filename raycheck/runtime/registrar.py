"""Hands checkpoints over to Ray Train: the controller's side. `runtime.registration` is the other."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray

from raycheck.config import Settings
from raycheck.core.layout import CHECKPOINTS, MANIFEST, ROOT
from raycheck.core.registration import chosen_every_s
from raycheck.runtime.compat import RayCheckpoints
from raycheck.runtime.registration import Offer

logger = logging.getLogger("raycheck")

_PREFIX = f"{ROOT}/{CHECKPOINTS}/"
_LAST_TIMEOUT_S = 120.0


class Registrar:
    """Asks the coordinator what is to be registered and tells Ray Train. Used in the controller's event loop.

    Nothing here raises: a checkpoint that is not registered is worth a
    warning, not the end of a run.

    Args:
        coordinator: Handle of its actor.
        settings: As the user chose them.
    """

    def __init__(self, coordinator: Any, settings: Settings) -> None:
        self._coordinator = coordinator
        self._settings = settings
        self._is_off = not settings.register or settings.storage_path is not None
        self._is_theirs = False
        """Whether the list is the user's own: then nothing is added to it."""

        self._checkpoints: RayCheckpoints | None = None
        self._asked: Any = None
        if settings.register and settings.storage_path is not None:
            # Ray Train takes only what lies below its own run folder.
            logger.info("checkpoints are not registered with Ray Train: storage_path is not the run's own")

    def begin(self, worker_group: Any) -> None:
        """Find Ray Train's list; called when a worker group has started."""
        if self._is_off:
            return
        self._checkpoints = RayCheckpoints.of(worker_group)
        if self._checkpoints is None:
            logger.warning(
                "this version of Ray (%s) hides its list of checkpoints: none of ours is registered",
                ray.__version__,
            )

    def poll(self) -> None:
        """Go one step further. Never waits for the coordinator, which may be restarting."""
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        if self._asked is not None:
            if not self._asked.done():
                return
            answered, self._asked = self._asked, None
            try:
                self._register(checkpoints, answered.result())
            except ray.exceptions.RayError as error:
                logger.warning("what to register could not be asked: %s", error)
        held, every_s = self._held(checkpoints), None
        if not self._is_theirs:
            every_s = chosen_every_s(self._settings.register_every_s, num_to_keep=checkpoints.num_to_keep)
        self._asked = self._coordinator.hear_registered.remote(held, every_s).future()

    async def finish(self) -> None:
        """Register the newest checkpoint. Waits for the coordinator and for storage, two minutes at most."""
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        try:
            held = self._held(checkpoints)
            if not self._is_theirs:
                offer = await asyncio.wait_for(self._coordinator.offer_last.remote(held), _LAST_TIMEOUT_S)
                self._register(checkpoints, offer)
                held = self._held(checkpoints)
            # So that what Ray has just deleted is not taken for its own by the next start.
            await asyncio.wait_for(self._coordinator.hear_registered.remote(held, None), _LAST_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError, asyncio.TimeoutError) as error:
            logger.warning("the last checkpoint could not be registered with Ray Train: %r", error)

    def _held(self, checkpoints: RayCheckpoints) -> list[str]:
        names = checkpoints.names()
        ours = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
        if len(ours) < len(names) and not self._is_theirs:
            # Their code reads back what it has reported: ours in its place would break it.
            logger.info("the train function reports checkpoints of its own: ours are not registered")
            self._is_theirs = True
        return ours

    def _register(self, checkpoints: RayCheckpoints, offer: Offer | None) -> None:
        if offer is None or self._is_theirs or offer.name in self._held(checkpoints):
            return
        path = _PREFIX + offer.name
        try:
            if not checkpoints.exists(f"{path}/{MANIFEST}"):
                logger.warning("%s is not where Ray Train looks, and is not registered", offer.name)
                return
            checkpoints.register(path, dict(offer.metrics))
        except Exception as error:  # noqa: BLE001  Ray Train's, of any kind: it would end the run
            logger.warning("%s could not be registered with Ray Train: %s", offer.name, error)
