"""Coordinator and agent as Ray actors: thin shells that pass calls on."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycheck.config import Settings
from raycheck.core.failure_rate import FailureKind
from raycheck.core.lineage import GenerationId
from raycheck.core.notice import Notice
from raycheck.runtime import messages
from raycheck.runtime.agent import Agent, Limits
from raycheck.runtime.coordinator import Coordinator
from raycheck.runtime.metrics import GaugeThread, RayMetrics
from raycheck.runtime.notices import DrainSource, NoticeWatcher, sources_of_this_machine
from raycheck.runtime.outbox import Outbox
from raycheck.runtime.registration import Offer
from raycheck.runtime.watching import NAMESPACE
from raycheck.store.objects import Store
from raycheck.store.run import RunStore

logger = logging.getLogger("raycheck")

_DELIVERY_TIMEOUT_S = 30.0

# Neither takes a CPU from training; both come back when they are killed, and
# calls in between are tried again.
_OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 16}


def _configure_logging() -> None:
    """Have raycheck's log lines, one per checkpoint, reach the driver's terminal."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("raycheck %(levelname)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class CoordinatorActor:
    """One per run, on the controller's node."""

    def __init__(
        self,
        store_url: str,
        store_options: Mapping[str, Any] | None,
        settings: Settings,
        *,
        run_name: str,
        run_id: str,
    ) -> None:
        _configure_logging()
        self._agents: dict[str, tuple[str, Outbox]] = {}
        """By node: which actor it is, and its orders."""

        self._agents_lock = threading.Lock()
        metrics = RayMetrics(run_name=run_name, run_id=run_id)
        self._coordinator = Coordinator(
            run_store=RunStore(Store(store_url, store_options)),
            settings=settings,
            send=self._send,
            measure=metrics.measure,
        )
        self._gauges = GaugeThread(self._coordinator.status, metrics.measure)
        # Here, once for all nodes, and not on each of them: it is a question to the cluster's head.
        drains = DrainSource(_draining_nodes, lambda: self._coordinator.nodes)
        self._watcher = NoticeWatcher([drains], self._coordinator.hear_notice)

    def check(self) -> None:
        """See `Coordinator.check`."""
        self._coordinator.check()

    def begin_generation(
        self, agents: dict[str, Any], world_size: int, *, has_lost_agents: bool, failure: FailureKind | None
    ) -> GenerationId:
        """See `Coordinator.begin_generation`; ``agents`` are handles by node."""
        for node, agent in agents.items():
            self._know(node, agent)
        return self._coordinator.begin_generation(
            set(agents), world_size, has_lost_agents=has_lost_agents, failure=failure
        )

    def receive(self, delivery: messages.Delivery, agent: Any) -> bool:
        """See `Coordinator.receive`; ``agent`` is the sender's handle."""
        self._know(delivery.node, agent)
        return self._coordinator.receive(delivery)

    def status(self) -> dict[str, Any]:
        """See `Coordinator.status`."""
        return {**self._coordinator.status(), "pid": os.getpid()}

    def hear_notice(self, notice: Notice) -> None:
        """See `Coordinator.hear_notice`."""
        self._coordinator.hear_notice(notice)

    def save_and_hold(self, seconds: float) -> int | None:
        """See `Coordinator.save_and_hold`."""
        return self._coordinator.save_and_hold(seconds)

    def hear_registered(self, held: list[str], every_s: float | None) -> Offer | None:
        """See `Coordinator.hear_registered`."""
        return self._coordinator.hear_registered(held, every_s)

    def offer_last(self, held: list[str]) -> Offer | None:
        """See `Coordinator.offer_last`."""
        return self._coordinator.offer_last(held)

    def close(self) -> None:
        """See `Coordinator.close`."""
        self._coordinator.close()
        self._gauges.close()

    def _know(self, node: str, agent: Any) -> None:
        actor_id = agent._actor_id.hex()
        with self._agents_lock:
            if node not in self._agents or self._agents[node][0] != actor_id:
                self._agents[node] = actor_id, Outbox(lambda orders: agent.obey.remote(orders).future())

    def _send(self, node: str, order: messages.Order) -> None:
        known = self._agents.get(node)
        if known is not None:
            known[1].put(order)


class AgentActor:
    """One per node that has workers."""

    def __init__(
        self,
        node: str,
        address: str,
        store_url: str,
        store_options: Mapping[str, Any] | None,
        limits: Limits,
        coordinator_name: str,
    ) -> None:
        _configure_logging()
        with contextlib.suppress(OSError):
            # Training goes first where both want the processor.
            os.nice(limits.niceness)
        # A handle among the arguments would be something that Ray may lose before it restarts this actor.
        self._coordinator_name = coordinator_name
        self._coordinator: Any = None
        self._handle: Any = None
        self._agent = Agent(
            node=node,
            address=address,
            run_store=RunStore(Store(store_url, store_options)),
            deliver=self._deliver,
            limits=limits,
        )
        self._watcher = NoticeWatcher(sources_of_this_machine(), self._agent.hear)

    def obey(self, orders: Sequence[messages.Order]) -> None:
        """See `Agent.obey`."""
        for order in orders:
            try:
                self._agent.obey(order)
            except Exception:
                # Those after it are waited for.
                logger.exception("the agent failed on %s and goes on", type(order).__name__)

    def status(self) -> dict[str, Any]:
        """See `Agent.status`."""
        return {**self._agent.status(), "pid": os.getpid()}

    def ready(self) -> None:
        """Return once the agent listens."""

    def _deliver(self, delivery: messages.Delivery) -> None:
        if self._handle is None:
            self._coordinator = ray.get_actor(self._coordinator_name, namespace=NAMESPACE)
            self._handle = ray.get_runtime_context().current_actor
        reference = self._coordinator.receive.remote(delivery, self._handle)
        if not ray.get(reference, timeout=_DELIVERY_TIMEOUT_S):
            self._agent.introduce()


def _draining_nodes() -> Mapping[str, int]:
    # Here, since an agent's process has no use for Ray Train, whose import takes seconds.
    from raycheck.runtime import compat

    return compat.draining_nodes()


def start_coordinator(
    name: str,
    store_url: str,
    store_options: Mapping[str, Any] | None,
    settings: Settings,
    *,
    run_name: str,
    run_id: str,
) -> Any:
    """Start the coordinator on this node, owned by this process.

    Args:
        name: Of the actor, which no other has.
        store_url: Of the run's store.
        store_options: Of its file system.
        settings: As the user chose them.
        run_name: As Ray Train has it; in the metrics.
        run_id: As Ray Train has it; another at each start.
    """
    node = ray.get_runtime_context().get_node_id()
    actor = ray.remote(CoordinatorActor).options(
        name=name,
        namespace=NAMESPACE,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        **_OPTIONS,
    )
    return actor.remote(store_url, store_options, settings, run_name=run_name, run_id=run_id)


def start_agent(
    node: str,
    address: str,
    store_url: str,
    store_options: Mapping[str, Any] | None,
    limits: Limits,
    coordinator_name: str,
) -> Any:
    """Start an agent on a node, owned by this process."""
    actor = ray.remote(AgentActor).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **_OPTIONS
    )
    return actor.remote(node, address, store_url, store_options, limits, coordinator_name)
