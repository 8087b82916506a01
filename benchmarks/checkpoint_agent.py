"""A raycheck agent in a process of its own, without Ray and without a coordinator.

    python checkpoint_agent.py ADDRESS URL OPTIONS_AS_JSON

Writes one JSON line to standard output for each shard that is durable or has
failed; reads the plan of each attempt that has ended from standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from raycheck.config import Settings
from raycheck.core import protocol
from raycheck.core.page import Plan
from raycheck.runtime import messages
from raycheck.runtime.agent import Agent
from raycheck.store.objects import Store
from raycheck.store.run import RunStore

NICENESS = Settings().agent_niceness


def main() -> None:
    address, url, options = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)

    def deliver(delivery: messages.Delivery) -> None:
        for message in delivery.messages:
            if isinstance(message, protocol.Durable):
                tell({"plan_id": message.plan_id, "at_s": time.monotonic()})
            elif isinstance(message, protocol.Failed):
                tell({"plan_id": message.plan_id, "failed": message.reason})

    run_store = RunStore(Store(url, json.loads(options)))
    agent = Agent(node="benchmark", address=address, run_store=run_store, deliver=deliver)
    tell({})
    for line in sys.stdin:
        agent.obey(messages.AttemptEnded(Plan(*json.loads(line)), is_committed=True, detail=""))
    agent.close()


def tell(fields: dict) -> None:
    print(json.dumps(fields), flush=True)


class AgentProcess:
    """Starts one and talks to it."""

    def __init__(self, address: str, url: str, options: dict) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, address, url, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.next_message() == {}

    def next_message(self) -> dict | None:
        """Return what it says next; None at its end. Blocks."""
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def end_attempt(self, plan_id: int, step: int) -> None:
        """Let it forget a shard that is durable."""
        self._process.stdin.write(f"[{plan_id}, {step}]\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)


if __name__ == "__main__":
    main()
