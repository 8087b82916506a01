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
from typing import Any

_LENGTH = struct.Struct("<I")
_PEER_CREDENTIALS = struct.Struct("3i")
MAX_MESSAGE_BYTES = 1 << 30


class Connection:
    """One end. Sending is thread-safe; one thread receives.

    Raises:
        ConnectionError: From every method, once the other end is gone.
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
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"a message of {length} bytes")
        message = json.loads(self._receive_exactly(length))
        assert isinstance(message, dict)
        return message, fd

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
