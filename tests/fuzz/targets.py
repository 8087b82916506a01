"""What is fuzzed: every parser of bytes that come from the store, the socket or the environment.

A target returns whether it accepted an input. Its documented errors count as
refused; whatever else it raises is a fault of the product. No target reads a
shard's header: nothing in raycheck does, since the layout says where tensors lie.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Callable

from tests.fuzz.target import Target, bomb_file

TARGETS: dict[str, str] = {
    "manifest": "records.manifests",
    "record": "records.records",
    "facts": "records.facts",
    "accounts": "records.accounts",
    "names": "records.names",
    "sums": "records.sums",
    "values": "values.values",
    "state": "values.state",
    "loader": "values.loaders",
    "offer": "values.offers",
    "message": "sockets.frames",
    "agent": "sockets.agents",
    "settings": "sockets.settings",
    "layout": "tables.layouts",
    "telemetry": "tables.telemetry",
}
"""Where each is made: some take seconds to import."""


def build(name: str) -> Target:
    """Return a target by its name, ready to run in this process, which from now on logs nothing of raycheck."""
    logging.getLogger("raycheck").disabled = True
    module, _, function = TARGETS[name].partition(".")
    make: Callable[[], Target] = getattr(importlib.import_module(f"tests.fuzz.{module}"), function)
    made = make()
    # A parser that runs a payload is found here, whichever it is.
    return dataclasses.replace(made, parse=functools.partial(watched, made.parse))


def watched(parse: Callable[[bytes], bool], data: bytes) -> bool:
    """Parse, and look whether a payload in the input was executed."""
    is_accepted = parse(data)
    assert not os.path.lexists(bomb_file()), "a payload in the input was executed"
    return is_accepted
