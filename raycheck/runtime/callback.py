"""`AutoCheckpoint`: the Ray Train callback that switches raycheck on."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any

import ray

from raycheck.config import Settings, make_settings
from raycheck.core.failure_rate import FailureKind
from raycheck.core.layout import ROOT
from raycheck.core.lineage import GenerationId
from raycheck.errors import ConfigError
from raycheck.runtime import actors, compat, worker
from raycheck.runtime.agent import Limits
from raycheck.runtime.filesystem import place_of
from raycheck.runtime.registrar import Registrar
from raycheck.runtime.session import WorkerContext
from raycheck.runtime.signals import install_sigterm
from raycheck.runtime.watching import coordinator_name
from raycheck.store.retry import PATIENT

logger = logging.getLogger("raycheck")

SETTINGS_VARIABLE = "RAYCHECK_SETTINGS"
_START_TIMEOUT_S = 120.0
_BEGIN_TIMEOUT_S = 2 * PATIENT.budget_s
"""More than a start waits for a store that does not answer."""

_STOP_MARGIN_S, _STOP_LEAST_S = 1.0, 1.0
"""Ray's own stopping takes some of the time that ``ray job stop`` gives."""

_COORDINATOR_ANSWER_S = 2.0
_AGENT_ANSWER_S = 5.0
"""An agent that was killed is back in less; one whose node is gone is not."""


class AutoCheckpoint(compat.ControllerCallback, compat.WorkerGroupCallback, compat.WorkerCallback):
    """Makes every job of a run checkpoint itself and resume.

    Give it to ``RunConfig(callbacks=[raycheck.AutoCheckpoint()])``, or name it
    in ``RAY_TRAIN_CALLBACKS`` and write settings into ``RAYCHECK_SETTINGS``
    (JSON). The train function then calls `raycheck.attach`.

    Args:
        **settings: The fields of `Settings`.

    Raises:
        ConfigError: If one is unknown or wrong.
    """

    def __init__(self, **settings: Any) -> None:
        from_environment = os.environ.get(SETTINGS_VARIABLE)
        if not settings and from_environment:
            self._settings = Settings.from_json(from_environment)
        else:
            self._settings = make_settings(settings)
        self._coordinator: Any = None
        self._coordinator_name = ""
        self._registrar: Registrar | None = None
        self._agents: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}
        self._generation: GenerationId | None = None
        self._failure: FailureKind | None = None
        self._store_url = ""
        self._store_options: Mapping[str, Any] | None = None

    @property
    def settings(self) -> Settings:
        """The settings, as validated."""
        return self._settings

    # On the controller. Ray Train ends the run when one of these raises, even
    # where failures are tolerated: only what the user must mend may do so.

    def after_controller_start(self, train_run_context: Any) -> None:
        """Start the coordinator and find out whether the store can be used."""
        if not self._settings.enabled:
            return
        if compat.is_replica_group_run(train_run_context):
            raise ConfigError(
                "raycheck cannot be used with replica groups (TorchFT): survivors keep their state there, "
                "and ranks no longer share one step; remove AutoCheckpoint or the replica groups",
                field="callbacks",
                value="AutoCheckpoint",
            )
        if not compat.run_was_named(train_run_context):
            logger.warning(
                "this run has no name: the same command starts another run and cannot resume this one; "
                "set RunConfig(name=...)"
            )
        self._store_url, self._store_options = self._choose_store(train_run_context)
        run_name = compat.run_path(train_run_context)[1]
        self._coordinator_name = coordinator_name(run_name, self._store_url)
        self._coordinator = actors.start_coordinator(
            self._coordinator_name,
            self._store_url,
            self._store_options,
            self._settings,
            run_name=run_name,
            run_id=compat.run_id(train_run_context),
        )
        self._registrar = Registrar(self._coordinator, self._settings)
        try:
            ray.get(self._coordinator.check.remote(), timeout=_START_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Claim a generation for the group and have an agent on each of its nodes."""
        if self._coordinator is not None:
            nodes = sorted(set(compat.node_ids(workers)))
            has_lost_agents = self._forget_lost_agents()
            if self._failure == "worker" and has_lost_agents:
                self._failure = "node"
            self._ensure_agents(nodes)
            here = {node: self._agents[node] for node in nodes}
            self._generation = ray.get(
                self._coordinator.begin_generation.remote(
                    here, len(workers), has_lost_agents=has_lost_agents, failure=self._failure
                ),
                timeout=_BEGIN_TIMEOUT_S,
            )
            self._failure = None
        return {}

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Find Ray Train's own list of checkpoints."""
        if self._registrar is not None:
            self._registrar.begin(worker_group)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Register what is due with Ray Train."""
        if self._registrar is not None:
            self._registrar.poll()

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Remember what kind of failure the next worker group follows; save before a resize."""
        self._failure = compat.failure_kind(current_state) or self._failure
        if compat.is_resizing(previous_state, current_state):
            self._save_and_hold(self._settings.resize_wait_s, "the resize")

    def before_controller_abort(self) -> None:
        """Save before Ctrl-C or ``ray job stop`` ends the job, in the time that there is."""
        self._save_and_hold(max(compat.stop_wait_s() - _STOP_MARGIN_S, _STOP_LEAST_S), "the stop")

    def _save_and_hold(self, seconds: float, what: str) -> None:
        if self._coordinator is None or seconds == 0:
            return
        try:
            step = ray.get(
                self._coordinator.save_and_hold.remote(seconds), timeout=seconds + _COORDINATOR_ANSWER_S
            )
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("no checkpoint before %s: %r", what, error)
            return
        if step is None:
            logger.warning(
                "no checkpoint before %s within %.0f s: what is newer is trained again", what, seconds
            )
        else:
            logger.info("step %d is saved before %s", step, what)

    async def before_controller_shutdown(self) -> None:
        """Register the last checkpoint, and let the coordinator write what is left to write."""
        if self._coordinator is None or self._registrar is None:
            return
        await self._registrar.finish()
        try:
            await self._coordinator.close.remote()
        except ray.exceptions.RayError as error:
            logger.warning("the coordinator could not be closed: %s", error)

    def _choose_store(self, train_run_context: Any) -> tuple[str, Mapping[str, Any] | None]:
        path, name, filesystem = compat.run_path(train_run_context)
        options = self._settings.storage_options
        if self._settings.storage_path is not None:
            path = self._settings.storage_path
        elif filesystem is not None:
            path, found = place_of(path, filesystem)
            options = options if options is not None else found
        return join_url(path, f"{name}/{ROOT}"), options

    def _forget_lost_agents(self) -> bool:
        """Drop agents that do not answer, since their node is gone; return whether there were any."""
        answers = {agent.ready.remote(): node for node, agent in self._agents.items()}
        if not answers:
            return False
        _, silent = ray.wait(list(answers), num_returns=len(answers), timeout=_AGENT_ANSWER_S)
        for answer in silent:
            node = answers[answer]
            logger.warning("the agent on node %s does not answer and is given up", node)
            ray.kill(self._agents.pop(node))
        return bool(silent)

    def _ensure_agents(self, nodes: list[str]) -> None:
        limits = Limits(
            parallel_parts=self._settings.upload_parallel_parts,
            bytes_per_s=self._settings.upload_bytes_per_s,
            niceness=self._settings.agent_niceness,
        )
        for node in nodes:
            if node in self._agents:
                continue
            self._addresses[node] = f"raycheck-{secrets.token_hex(8)}"
            self._agents[node] = actors.start_agent(
                node,
                self._addresses[node],
                self._store_url,
                self._store_options,
                limits,
                self._coordinator_name,
            )
        ray.get([self._agents[node].ready.remote() for node in nodes], timeout=_START_TIMEOUT_S)

    # On each worker: this object has been copied there.

    def after_init_train_context(self) -> None:
        """Tell `attach` where it is, and close when the train function ends."""
        if self._generation is None:
            # Switched off: attach() is to do nothing.
            off = dataclasses.replace(self._settings, enabled=False)
            worker.set_context(_context_of("", GenerationId(0, "0"), off))
            return
        node = ray.get_runtime_context().get_node_id()
        worker.set_context(_context_of(self._addresses[node], self._generation, self._settings))
        compat.after_train_function(on_return=_close, on_error=_abandon)
        install_sigterm(self._settings.sigterm_grace_s, tell=worker.tell_notice)

    def __getstate__(self) -> dict[str, Any]:
        # Workers talk to their agent over its socket; they need no handles.
        return {**self.__dict__, "_coordinator": None, "_registrar": None, "_agents": {}}


def join_url(path: str, relative: str) -> str:
    """Append to a path or URL, before its query if it has one."""
    base, mark, query = path.partition("?") if "://" in path else (path, "", "")
    return f"{base.rstrip('/')}/{relative}{mark}{query}"


def _context_of(address: str, generation: GenerationId, settings: Settings) -> WorkerContext:
    rank, world_size, local_world_size = compat.rank_and_sizes()
    return WorkerContext(
        address=address,
        generation=generation,
        rank=rank,
        world_size=world_size,
        settings=settings,
        local_world_size=local_world_size,
    )


def _close() -> None:
    checkpointer = worker.attached()
    if checkpointer is not None:
        checkpointer.close()


def _abandon() -> None:
    checkpointer = worker.attached()
    if checkpointer is not None:
        checkpointer.abandon()
