"""How those who watch find the coordinators of a Ray cluster.

A coordinator is a named actor, so that anybody who can reach the cluster can
ask it. A name is used once: a run that starts again while Ray has not noticed
yet that its last job is gone, or beside a second job of the same name, must
never be refused for a name that is taken.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

import ray

NAMESPACE = "raycheck"
_ASK_S = 5.0
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


def coordinator_name(run_name: str, store_url: str) -> str:
    """Return a name for a coordinator that no other has had: the run, its store's digest, and a random part."""
    digest = hashlib.sha256(store_url.encode()).hexdigest()[:12]
    return f"{_ODD.sub('-', run_name)[:80]}-{digest}-{secrets.token_hex(4)}"


def names() -> list[str]:
    """Return the names of the coordinators that are there, those that are being restarted included."""
    listed: list[dict[str, Any]] = ray.util.list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in listed if each["namespace"] == NAMESPACE)


def ask_all() -> dict[str, dict[str, Any]]:
    """Return the status of each coordinator in the connected cluster that answers, by its actor's name.

    Blocks for their answers, five seconds at most. One that is not there any
    more, or whose raycheck is another and does not know the question, is left out.
    """
    asked: dict[Any, str] = {}
    for name in names():
        try:
            asked[_ask(name)] = name
        except (ValueError, AttributeError):
            # It has ended since the list was made, or is none of ours.
            continue
    if not asked:
        return {}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ASK_S)
    found: dict[str, dict[str, Any]] = {}
    for reference in answered:
        try:
            found[asked[reference]] = dict(ray.get(reference))
        except ray.exceptions.RayError:
            continue
    return found


def ask(name: str) -> dict[str, Any] | None:
    """Return the status of one coordinator; None if it is gone or does not answer in five seconds."""
    try:
        status: dict[str, Any] = ray.get(_ask(name), timeout=_ASK_S)
    except (ValueError, ray.exceptions.RayError):
        return None
    return status


def _ask(name: str) -> Any:
    # Not tried again, as calls of this actor are: one that is gone would be asked for ever.
    actor: Any = ray.get_actor(name, namespace=NAMESPACE)
    return actor.status.options(max_task_retries=0).remote()
