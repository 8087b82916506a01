"""Targets: messages on the agent's socket, and the settings in the environment."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
from typing import Any

from raycheck.config import Settings
from raycheck.core.page import PAGE_BYTES
from raycheck.errors import ConfigError, StorageError
from raycheck.runtime import messages, wire
from raycheck.runtime.agent import Agent
from raycheck.store.objects import Store
from raycheck.store.run import RunStore
from tests.fuzz.mutate import Mutator, words
from tests.fuzz.tables import layout_rows
from tests.fuzz.target import JSON_NUMBERS, Target, check_types

LENGTH = struct.Struct("<I")

MESSAGES: list[dict[str, Any]] = [
    {"op": "hello", "has_joined": False, "generation": [3, "0a1b2c3d"], "rank": 0, "world_size": 2},
    {"op": "joined"},
    {"op": "table", "rows": [entry.to_row() for entry in layout_rows(1, 1)]},
    {"op": "missed", "plan_id": 3},
    {"op": "failed", "plan_id": 3, "reason": "disk"},
    {"op": "ask", "step": 4, "is_waiting": True},
    {"op": "report", "ref": [1200, 3, "0a1b2c3d", 12], "error": None, "is_mismatch": False},
    {"op": "report", "ref": None, "error": "x", "is_mismatch": True},
    {
        "op": "staged",
        "plan": [3, 40],
        "num_bytes": 64,
        "stall_s": 0.01,
        "replica_digest": "0a",
        "metrics": {"loss": 1.5},
    },
    {"op": "arena"},
    {"op": "copied", "plan": [4, 44], "num_bytes": 64, "slot": 0},
    {"op": "notice", "source": "SIGTERM", "seconds_left": 30.0, "detail": "told to end"},
    {"op": "read", "ref": [1200, 3, "0a1b2c3d", 12], "reads": [[0, 4096, 64, 0]]},
    {"op": "closed", "step": 50},
]
"""What a worker says to its agent."""


def frames() -> Target:
    """Bytes as a connection gets them."""

    def parse(data: bytes) -> bool:
        ours, theirs = socket.socketpair()
        connection = wire.Connection(ours)
        count = 0
        try:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            theirs.settimeout(20)
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            while True:
                message, fd = connection.receive()
                assert isinstance(message, dict)
                assert fd is None
                count += 1
        except (ConnectionError, ValueError):
            return count > 0
        finally:
            connection.close()
            theirs.close()

    bodies = [json.dumps(message, separators=(",", ":")).encode() for message in MESSAGES]
    bodies += [b"[]", b"1", b"null", b'"x"', b"[" * 50_000, b"{" * 100, b"9" * 5000, b"\xff\xfe", b"NaN", b""]
    seeds = [LENGTH.pack(len(body)) + body for body in bodies]
    seeds += [LENGTH.pack(n) + b"{}" for n in (0, 1, 2, 3, 2**20, 2**30, 2**30 + 1, 2**31, 2**32 - 1)]
    seeds.append(b"".join(seeds[:4]))
    return Target("message", Mutator(seeds, is_json=False, max_bytes=100_000), parse)


class _Watched:
    """A real agent whose store answers nothing, and what it lets out."""

    def __init__(self) -> None:
        self.delivered: list[Any] = []
        self.failures: list[str] = []
        threading.excepthook = lambda args: self.failures.append(repr(args.exc_value))
        self.address = f"raycheck-fuzz-{os.getpid()}-{random.SystemRandom().randrange(10**9)}"
        store = Store("memory://fuzz", connect=self._refuse)
        self.agent = Agent(
            node="n", address=self.address, run_store=RunStore(store), deliver=self.delivered.append
        )
        self._segment = os.memfd_create("fuzz")
        os.ftruncate(self._segment, PAGE_BYTES + 4096)
        self._num_descriptors = len(os.listdir("/proc/self/fd"))

    @staticmethod
    def _refuse(*_: Any) -> Any:
        raise StorageError("the store of this test does not answer", key="", operation="connect")

    def hear(self, lines: list[bytes]) -> None:
        """Send lines as the messages of one worker, a segment with the first, until the agent hangs up."""
        with socket.socket(socket.AF_UNIX) as worker:
            worker.settimeout(20)
            worker.connect("\0" + self.address)
            try:
                socket.send_fds(worker, [LENGTH.pack(len(lines[0]))], [self._segment])
                worker.sendall(lines[0])
                for line in lines[1:]:
                    worker.sendall(LENGTH.pack(len(line)) + line)
                worker.shutdown(socket.SHUT_WR)
                while worker.recv(1 << 16):
                    pass
            except ConnectionError:
                pass  # the agent hung up before it had read all

    def settle(self) -> None:
        """End all attempts, as a coordinator does, and check that the agent is as it was."""
        for worker in list(self.agent._workers.values()):
            for job in list(worker.uploads.values()):
                self.agent.obey(messages.AttemptEnded(job.plan, False, "the batch is over"))
        assert self.agent.status()["node"] == "n"
        assert all(thread.is_alive() for thread in self.agent._threads), "a thread of the agent died"
        # Connections that are being closed hold a few.
        assert len(os.listdir("/proc/self/fd")) < self._num_descriptors + 100, "descriptors leak"


def agents() -> Target:
    """Lines of JSON, sent to a real agent; the first is the hello."""
    watched = _Watched()

    def parse(data: bytes) -> bool:
        watched.hear(data.split(b"\n")[:50])
        told = [message for delivery in watched.delivered[:] for message in delivery.messages]
        watched.delivered.clear()
        for message in told:
            check_types(message)
        if watched.failures:
            raise AssertionError(watched.failures.pop())
        return bool(told)

    lines = [json.dumps(message, separators=(",", ":")).encode() for message in MESSAGES]
    seeds = [
        lines[0],
        b"\n".join(lines),
        *(lines[0] + b"\n" + line for line in lines[1:]),
        b"\n".join(lines[1:]),
    ]
    snippets = [
        *JSON_NUMBERS,
        *words(
            '"hello" "joined" "table" "staged" "read" "report" "closed" "missed" "failed" "ask" "?" {"loss":"x"}'
        ),
        *words(
            '[3,"0a1b2c3d"] [1200,3,"0a1b2c3d",12] [3,40] [0,0] [16777216,40] [1,1099511627776] [[0,4096,64,0]]'
        ),
        *words('[[-1,-1,-1,-1]] [[0,0,4611686018427387904,0]] [[0,0,1]] [["a",0,1,0]] [3,"../../x"] ["3",1]'),
    ]
    return Target("agent", Mutator(seeds, snippets=snippets, max_bytes=60_000), parse, watched.settle)


def settings() -> Target:
    """``RAYCHECK_SETTINGS``."""

    def parse(data: bytes) -> bool:
        # As os.environ gives it.
        try:
            made = Settings.from_json(data.decode("utf-8", "surrogateescape"))
        except ConfigError:
            return False
        assert isinstance(made, Settings)
        return True

    valid: list[dict[str, Any]] = [
        {},
        {"max_overhead": 0.02, "keep_last": 2, "resume": "auto"},
        {"storage_path": "s3://b/p", "storage_options": {"key": "a", "client_kwargs": {"region_name": "x"}}},
        {
            "min_interval_s": 1.5,
            "max_interval_s": 60,
            "interval_steps": None,
            "resume": 77,
            "on_failure": "warn",
        },
        {"gpu_days_per_failure": 400, "upload_parallel_parts": 4, "overlap": False, "enabled": True},
        {"recovery_point_s": 100.0, "restart_s": 0, "on_conflict": "bound", "node_memory_bytes": 1 << 30},
    ]
    snippets = [
        *JSON_NUMBERS,
        *words(
            '"auto" "fresh" "builtins.eval" ["os.system"] "max_overhead" "__class__" "allow_pickle" 0.5 64 65'
        ),
    ]
    return Target(
        "settings", Mutator([json.dumps(each).encode() for each in valid], snippets=snippets), parse
    )
