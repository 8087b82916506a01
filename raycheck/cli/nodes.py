"""Connects to a Ray cluster, and gathers facts on every node of it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycheck.cli.facts import gather
from raycheck.cli.health import MachineFacts

_TIMEOUT_S = 120.0
_KNOCK_S = 5.0


class ClusterError(Exception):
    """The cluster cannot be reached."""


def gather_on_nodes(
    address: str, url: str | None, options: Mapping[str, Any], *, probe_bytes: int
) -> dict[str, MachineFacts | str]:
    """Return the facts of each node that is alive, or why there are none.

    Blocks until all have answered, two minutes at most.

    Raises:
        ClusterError: If the cluster cannot be reached.
    """
    with connected(address):
        return _ask_all(url, options, probe_bytes)


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of a cluster. Blocks until it is reached.

    Args:
        address: "host:port", "auto", or whatever else ``ray.init`` takes.

    Raises:
        ClusterError: If it cannot be reached.
    """
    _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    # Ray raises what it likes: ConnectionError, RuntimeError, ValueError.
    except Exception as error:
        raise ClusterError(f"--address {address}: no Ray cluster can be reached: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Look whether anybody listens at "host:port": Ray would try for many minutes.

    Raises:
        ClusterError: If nobody does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"--address {address}: no Ray cluster can be reached: {error}") from error


def _ask_all(url: str | None, options: Mapping[str, Any], probe_bytes: int) -> dict[str, MachineFacts | str]:
    list_nodes: Any = ray.nodes
    nodes = [node for node in list_nodes() if node["Alive"]]
    remote_gather: Any = ray.remote(gather)  # type: ignore[arg-type]  # Ray's types know no keywords
    asked = {}
    for node in nodes:
        # Takes no CPU from a job that is running; and it must be this node.
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = remote_gather.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        name = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
        asked[name] = task.remote(url, options, probe_bytes=probe_bytes)
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_TIMEOUT_S)
    return {name: _answer(reference) for name, reference in asked.items()}


def _answer(reference: Any) -> MachineFacts | str:
    try:
        facts: MachineFacts = ray.get(reference, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return f"no answer within {_TIMEOUT_S:.0f} s"
    # Whatever failed there, an import above all.
    except Exception as error:  # noqa: BLE001
        return str(error).strip().splitlines()[-1][:300]
    return facts
