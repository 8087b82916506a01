"""Messages between a worker and its agent over a Unix socket: JSON, and descriptors beside it.

The address is in Linux's abstract namespace: no file is left behind.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<I")
_PEER_CREDENTIALS = struct.Struct("3i")
MAX_MESSAGE_BYTES = 1 << 30


class Connection:
    """One end. Sending is thread-safe; one thread receives.

    Raises:
        ConnectionError: From every method, once the other end is gone.
        ValueError: From `receive`, if what came is no message.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send_lock = threading.Lock()

    def send(self, op: str, *, fd: int | None = None, **fields: Any) -> None:
        """Send one message; blocks only while the socket's buffer is full."""
        body = json.dumps({"op": op, **fields}, separators=(",", ":")).encode()
        head = _LENGTH.pack(len(body))
        with self._send_lock:
            if fd is not None:
                socket.send_fds(self._socket, [head], [fd])
                self._socket.sendall(body)
            else:
                self._socket.sendall(head + body)

    def receive(self) -> tuple[dict[str, Any], int | None]:
        """Return the next message and the descriptor that came with it, if any. Blocks."""
        head, fd = self._receive_head()
        try:
            (length,) = _LENGTH.unpack(head)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            return parse_message(self._receive_exactly(length)), fd
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close; wakes a thread that receives."""
        with contextlib.suppress(OSError):  # the other end may have been first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def peer_uid(self) -> int:
        """Return the user id of the process at the other end, as the kernel knows it."""
        data = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        return int(_PEER_CREDENTIALS.unpack(data)[1])

    def _receive_head(self) -> tuple[bytes, int | None]:
        fds = array.array("i")
        data, ancillary, _, _ = self._socket.recvmsg(
            _LENGTH.size, socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            raise ConnectionResetError("the other end is gone")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        data += self._receive_exactly(_LENGTH.size - len(data))
        for extra in fds[1:]:
            os.close(extra)
        return data, fds[0] if fds else None

    def _receive_exactly(self, num_bytes: int) -> bytes:
        parts = []
        while num_bytes:
            part = self._socket.recv(min(num_bytes, 1 << 20))
            if not part:
                raise ConnectionResetError("the other end is gone")
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


def parse_message(body: bytes) -> dict[str, Any]:
    """Return a message; its fields are `check_fields`'s.

    Raises:
        ValueError: If it is none.
    """
    try:
        message = json.loads(body)
    except RecursionError as error:
        raise ValueError("a message without end") from error
    if type(message) is not dict or type(message.get("op")) is not str:
        raise ValueError("a message that is none")
    return message


def check_fields(message: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's message, whose fields are all there and of their types.

    So whoever takes it, the coordinator included, need not ask again.

    Raises:
        ValueError: If it is no message of a worker.
    """
    fields = _FIELDS.get(message["op"])
    if fields is None:
        raise ValueError(f"unknown message {message['op'][:100]!r}")
    for name, is_right in fields.items():
        if name not in message or not is_right(message[name]):
            raise ValueError(f"{message['op']}: {name} is missing or wrong")
    for name, is_right in _OPTIONAL_FIELDS.get(message["op"], {}).items():
        if name in message and not is_right(message[name]):
            raise ValueError(f"{message['op']}: {name} is wrong")
    return message


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_duration(value: object) -> bool:
    return type(value) in (int, float) and isinstance(value, int | float) and 0 <= value < 1e12


def _is_generation(value: object) -> bool:
    return type(value) is list and len(value) == 2 and _is_whole(value[0]) and _is_id(value[1])


def _is_id(value: object) -> bool:
    return type(value) is str and 0 < len(value) <= 64 and set(value) <= set("0123456789abcdef")


def _is_ref(value: object) -> bool:
    if type(value) is not list or len(value) != 4:
        return False
    step, *generation, plan_id = value
    return _is_whole(step) and _is_generation(generation) and _is_whole(plan_id)


def _is_plan(value: object) -> bool:
    # As they fit the word of the control page.
    return (
        type(value) is list
        and len(value) == 2
        and all(map(_is_whole, value))
        and value[0] < 1 << 24
        and value[1] < 1 << 40
    )


def _is_metrics(value: object) -> bool:
    return type(value) is dict and all(type(number) in (int, float) for number in value.values())


def _are_reads(value: object) -> bool:
    return type(value) is list and all(
        type(read) is list and len(read) == 4 and all(map(_is_whole, read)) for read in value
    )


def _is_row(value: object) -> bool:
    if type(value) is not list or len(value) != 9:
        return False
    name, dtype, *shapes, owner, rank, begin, num_bytes = value
    return (
        _is_text(name)
        and _is_text(dtype)
        and all(type(shape) is list and all(map(_is_whole, shape)) for shape in shapes)
        and (owner == -1 or _is_whole(owner))
        and type(owner) is int
        and all(map(_is_whole, (rank, begin, num_bytes)))
    )


def _are_rows(value: object) -> bool:
    return type(value) is list and all(map(_is_row, value))


def _or_none(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_right(value)


_FIELDS: dict[str, dict[str, Callable[[object], bool]]] = {
    "adopt": {"generation": _is_generation, "rank": _is_whole, "world_size": _is_whole},
    "hello": {
        "generation": _is_generation,
        "rank": _is_whole,
        "world_size": _is_whole,
        "has_joined": _is_flag,
    },
    "joined": {},
    "arena": {},
    "table": {"rows": _are_rows},
    "copied": {"plan": _is_plan, "num_bytes": _is_whole},
    "staged": {
        "plan": _is_plan,
        "num_bytes": _is_whole,
        "stall_s": _is_duration,
        "replica_digest": _is_text,
        "metrics": _is_metrics,
    },
    "missed": {"plan_id": _is_whole},
    "failed": {"plan_id": _is_whole, "reason": _is_text},
    "ask": {"step": _is_whole, "is_waiting": _is_flag},
    "read": {"ref": _is_ref, "reads": _are_reads},
    "report": {"ref": _or_none(_is_ref), "error": _or_none(_is_text), "is_mismatch": _is_flag},
    "notice": {"source": _is_text, "seconds_left": _is_duration, "detail": _is_text},
    "closed": {"step": _is_whole},
}
"""What a worker says, and what each field must be; further fields are let pass."""

_OPTIONAL_FIELDS: dict[str, dict[str, Callable[[object], bool]]] = {
    "adopt": {"generation": _is_generation, "rank": _is_whole, "world_size": _is_whole},
    "joined": {"seconds": _is_duration, "num_bytes": _is_whole, "num_memory_bytes": _is_whole},
    "copied": {"slot": _is_whole},
    "staged": {"slot": _is_whole, "place": _is_text, "accounts": lambda value: type(value) is dict},
}


def connect(address: str) -> Connection:
    """Connect to the agent that listens at ``address``.

    Raises:
        OSError: If none does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + address)
    except OSError:
        sock.close()
        raise
    return Connection(sock)


def listen(address: str) -> socket.socket:
    """Return a socket that listens at ``address``.

    Raises:
        OSError: If another process does already.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + address)
    sock.listen(128)
    return sock
