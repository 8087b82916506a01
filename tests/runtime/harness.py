"""Real agent and worker processes around a real coordinator, without Ray.

A fork server that has torch loaded makes a worker in a tenth of a second, so
these tests can afford many kills. What Ray adds (placing actors, restarting
them, noticing deaths) is tested with Ray.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from raycheck.config import Settings
from raycheck.core.lineage import GenerationId
from raycheck.runtime import messages
from raycheck.runtime.agent import Limits
from raycheck.runtime.coordinator import Coordinator
from raycheck.store.objects import Store
from raycheck.store.run import RunStore

processes = multiprocessing.get_context("forkserver")
# What a worker imports; each would spend seconds on it.
processes.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "raycheck.runtime.compat", "tests.runtime.harness"]
)

DEADLINE_S = 60.0


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until the condition holds; return its value."""
    end_s = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end_s, f"gave up waiting for {what}"
        time.sleep(0.01)


def _agent_main(node, address, url, options, listener_address, limits) -> None:
    from raycheck.runtime.agent import Agent

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Orders first: the answer to a delivery must find a way back.
    order_end, delivery_end = Client(listener_address), Client(listener_address)
    order_end.send(("orders", node))
    delivery_end.send(("deliveries", node))
    lock = threading.Lock()

    def deliver(delivery: messages.Delivery) -> None:
        with lock:
            delivery_end.send(delivery)
            known = delivery_end.recv()
        if not known:
            agent.introduce()

    agent = Agent(
        node=node, address=address, run_store=RunStore(Store(url, options)), deliver=deliver, limits=limits
    )
    while True:
        try:
            agent.obey(order_end.recv())
        except EOFError:
            return


def _worker_main(context_fields, init_file, train, config, result_path) -> None:
    import torch
    import torch.distributed as dist

    from raycheck.runtime import worker
    from raycheck.runtime.session import WorkerContext

    torch.set_num_threads(1)
    context = WorkerContext(**context_fields)
    worker.set_context(context)
    if context.world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{init_file}", rank=context.rank, world_size=context.world_size
        )
    try:
        result = {"value": train({"rank": context.rank, "world_size": context.world_size, **config})}
    except BaseException as error:  # noqa: BLE001  the test looks at it
        result = {"error": f"{type(error).__name__}: {error}"}
        if worker.attached():
            worker.attached().abandon()
    else:
        if worker.attached():
            worker.attached().close()
    temporary = f"{result_path}.tmp"
    Path(temporary).write_text(json.dumps(result))
    os.rename(temporary, result_path)
    sys.stdout.flush()
    # Without the interpreter's shutdown: other ranks may be gone already.
    os._exit(0)


class Generation:
    """One start of a worker group."""

    def __init__(self, id: GenerationId, world_size: int, folder: Path) -> None:
        self.id = id
        self.workers: list[Any] = []
        self._folder = folder
        self.world_size = world_size

    def kill(self, rank: int) -> None:
        """SIGKILL one worker and wait for its end."""
        os.kill(self.workers[rank].pid, signal.SIGKILL)
        self.workers[rank].join(DEADLINE_S)

    def kill_all(self) -> None:
        for rank, worker in enumerate(self.workers):
            if worker.is_alive():
                # It may end by itself in between.
                with contextlib.suppress(ProcessLookupError):
                    self.kill(rank)

    def result_path(self, rank: int) -> Path:
        return self._folder / f"result-{self.id}-{rank}.json"

    def results(self, deadline_s: float = DEADLINE_S) -> list[Any]:
        """Wait for all ranks and return what they returned; raise what one raised."""
        found = self.outcomes(deadline_s)
        for rank, result in enumerate(found):
            assert "error" not in result, f"rank {rank}: {result['error']}"
        return [result["value"] for result in found]

    def outcomes(self, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
        for rank in range(self.world_size):
            wait_until(
                lambda rank=rank: self.result_path(rank).exists() or not self.workers[rank].is_alive(),
                f"rank {rank} of {self.id}",
                deadline_s,
            )
            assert self.result_path(rank).exists(), f"rank {rank} ended without a result"
        return [json.loads(self.result_path(rank).read_text()) for rank in range(self.world_size)]


class LocalCluster:
    """A run's coordinator in this process, its agents and workers in others."""

    def __init__(
        self, url, options=None, *, num_nodes: int = 1, clock=time.monotonic, **settings: Any
    ) -> None:
        self.url, self.options = url, options
        self._clock = clock
        self.settings = Settings(**settings)
        self.run_store = RunStore(Store(url, options))
        self.folder = Path(tempfile.mkdtemp(prefix="raycheck-test-"))
        self._listener = Listener()
        self._pipes: dict[tuple[str, str], Any] = {}
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()
        self.nodes = [f"node{i}" for i in range(num_nodes)]
        self.addresses = {node: f"raycheck-test-{secrets.token_hex(8)}" for node in self.nodes}
        self.agents: dict[str, Any] = {}
        self.generations: list[Generation] = []
        self.orders: list[messages.Order] = []
        self.coordinator: Coordinator | None = self._make_coordinator()
        for node in self.nodes:
            self.start_agent(node)

    def _make_coordinator(self) -> Coordinator:
        return Coordinator(
            run_store=self.run_store, settings=self.settings, send=self._send, clock=self._clock
        )

    def start_agent(self, node: str) -> None:
        self._pipes.pop(("orders", node), None)
        agent = processes.Process(
            target=_agent_main,
            args=(
                node,
                self.addresses[node],
                self.url,
                self.options,
                self._listener.address,
                Limits(bytes_per_s=self.settings.upload_bytes_per_s),
            ),
            daemon=True,
        )
        agent.start()
        self.agents[node] = agent
        wait_until(lambda: ("orders", node) in self._pipes, f"agent {node}")

    def kill_agent(self, node: str) -> None:
        os.kill(self.agents[node].pid, signal.SIGKILL)
        self.agents[node].join(DEADLINE_S)

    def replace_coordinator(self) -> None:
        """Lose the coordinator with all that it knows, and start another."""
        self.coordinator._inbox.put(None)
        self.coordinator = self._make_coordinator()

    def start(self, train, config=None, *, world_size: int = 1) -> Generation:
        """Start a worker group that runs ``train(config)`` on every rank."""
        generation = Generation(
            self.coordinator.begin_generation(set(self.nodes), world_size), world_size, self.folder
        )
        init_file = self.folder / f"init-{generation.id}"
        for rank in range(world_size):
            node = self.nodes[rank * len(self.nodes) // world_size]
            fields = {
                "address": self.addresses[node],
                "generation": generation.id,
                "rank": rank,
                "world_size": world_size,
                "settings": self.settings,
                "local_world_size": world_size,
            }
            worker = processes.Process(
                target=_worker_main,
                args=(fields, init_file, train, config or {}, generation.result_path(rank)),
                daemon=True,
            )
            worker.start()
            generation.workers.append(worker)
        self.generations.append(generation)
        return generation

    def committed_steps(self) -> list[int]:
        return [ref.step for ref in self.run_store.attempts() if self.run_store.is_committed(ref)]

    def status(self) -> dict[str, Any]:
        return self.coordinator.status()

    def close(self) -> None:
        self._is_closed = True
        for generation in self.generations:
            generation.kill_all()
        for node, agent in self.agents.items():
            if agent.is_alive():
                self.kill_agent(node)
        self.coordinator.close()
        self._listener.close()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()

    def _accept(self) -> None:
        while True:
            try:
                pipe = self._listener.accept()
            except (OSError, EOFError):
                return
            kind, node = pipe.recv()
            self._pipes[kind, node] = pipe
            if kind == "deliveries":
                threading.Thread(target=self._receive, args=(pipe,), daemon=True).start()

    def _receive(self, pipe) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                # First the delivery: while it waits for one, the coordinator may be replaced.
                delivery = pipe.recv()
                pipe.send(self.coordinator.receive(delivery))

    def _send(self, node: str, order: messages.Order) -> None:
        self.orders.append(order)
        pipe = self._pipes.get(("orders", node))
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.send(order)


__all__ = ["DEADLINE_S", "Generation", "LocalCluster", "wait_until"]
