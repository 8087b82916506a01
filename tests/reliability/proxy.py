"""A proxy before a real S3 server that does to requests what networks and servers do.

    proxy = Proxy(server.endpoint)
    trouble = proxy.plan(LoseReply("put", key="manifest.json$"))
    ...                                  # a store whose endpoint is proxy.endpoint
    assert trouble.num_fired == 1

Operations are told apart as `raycheck.testing` names them: "put" (whole
objects), "begin", "part", "complete", "abort", "get", "head", "list",
"delete", and "other". What no trouble wants is passed on as it is. Nothing of
raycheck is imported here: the proxy sees HTTP, as a server does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import re
import socket
import struct
import threading
import time
import urllib.parse
from typing import BinaryIO, NoReturn

_TIMEOUT_S = 60.0
_READ_BYTES = 1 << 16
_HOP_HEADERS = ("connection", "transfer-encoding", "content-length", "keep-alive")


@dataclasses.dataclass(slots=True)
class Request:
    """One request as it came in; its body is still to be read."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    operation: str
    key: str
    """Bucket and key, as in the path, decoded; of a listing bucket and prefix."""

    access_key: str

    def header(self, name: str) -> str:
        """Return a header's value, or ""."""
        return next((value for each, value in self.headers if each.lower() == name), "")


@dataclasses.dataclass(slots=True)
class Reply:
    """What the server answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class CutError(Exception):
    """The connection to the client ends here."""


class Trouble:
    """A planned fault; the subclasses say what it does to a request.

    Args:
        operations: Which it concerns; none: all.
        key: A pattern that is searched for in bucket and key.
        skip: So many requests are let through first.
        times: To so many it happens; None: to all that follow.
    """

    def __init__(self, *operations: str, key: str = "", skip: int = 0, times: int | None = 1) -> None:
        self.operations = operations
        self.pattern = re.compile(key)
        self.num_fired = 0
        """How often it has happened."""

        self._skip = skip
        self._left = times
        self._lock = threading.Lock()

    @property
    def is_spent(self) -> bool:
        """Whether it will not happen any more by itself."""
        return self._left == 0

    def wants(self, request: Request) -> bool:
        """Whether it concerns this request; counts those that it lets through."""
        if self.operations and request.operation not in self.operations:
            return False
        if not self.pattern.search(request.key) or not self.is_due(request):
            return False
        with self._lock:
            if self._skip > 0:
                self._skip -= 1
                return False
            if self._left is not None:
                if self._left == 0:
                    return False
                self._left -= 1
            self.num_fired += 1
        return True

    def is_due(self, request: Request) -> bool:
        """A further condition."""
        return True

    def carry_out(self, exchange: Exchange) -> None:
        """Do it; by default nothing is wrong."""
        exchange.answer(exchange.forward())


class Delay(Trouble):
    """The request reaches the server ``delay_s`` late."""

    def __init__(
        self, delay_s: float, *operations: str, key: str = "", skip: int = 0, times: int | None = 1
    ) -> None:
        super().__init__(*operations, key=key, skip=skip, times=times)
        self.delay_s = delay_s

    def carry_out(self, exchange: Exchange) -> None:
        """Wait, then pass it on."""
        exchange.read_body()
        exchange.proxy.wait(self.delay_s)
        super().carry_out(exchange)


class CutRequest(Trouble):
    """The connection is reset when half of the request's body has come; the server never sees it."""

    def carry_out(self, exchange: Exchange) -> None:
        """Read half and cut."""
        exchange.read_body(share=0.5)
        exchange.cut()


class CutReply(Trouble):
    """The request is done; its reply ends half way through the body, and the connection with it."""

    def carry_out(self, exchange: Exchange) -> None:
        """Send half of the body under the headers of the whole."""
        reply = exchange.forward()
        exchange.answer(reply, num_body_bytes=len(reply.body) // 2)
        raise CutError


class LoseReply(Trouble):
    """The request is done, and the connection is cut before a byte of the reply."""

    def carry_out(self, exchange: Exchange) -> None:
        """Pass it on and cut."""
        exchange.forward()
        exchange.cut()


class Refuse(Trouble):
    """The server is not asked: an error of S3 is the answer."""

    def __init__(
        self,
        status: int,
        code: str,
        *operations: str,
        key: str = "",
        skip: int = 0,
        times: int | None = 1,
    ) -> None:
        super().__init__(*operations, key=key, skip=skip, times=times)
        self.status, self.code = status, code

    def carry_out(self, exchange: Exchange) -> None:
        """Answer with the error."""
        exchange.read_body()
        exchange.answer(error_reply(self.status, self.code))


class Expire(Refuse):
    """The credentials that the first request carries have run out; others are good.

    Args:
        operations: From the first of these on, all requests are refused.
        key: A pattern for that first request.
        skip: So many such requests are let through before.
    """

    def __init__(self, *operations: str, key: str = "", skip: int = 0) -> None:
        super().__init__(403, "ExpiredToken", *operations, key=key, skip=skip, times=None)
        self.access_key: str | None = None

    def wants(self, request: Request) -> bool:
        """Whether it is the first, or carries what has run out with it."""
        if self.access_key is not None:
            expired = request.access_key == self.access_key
            self.num_fired += expired
            return expired
        if not super().wants(request):
            return False
        self.access_key = request.access_key
        return True


class StaleListing(Trouble):
    """Each listing is answered as it was the first time that it was asked for."""

    def __init__(self, *, key: str = "") -> None:
        super().__init__("list", key=key, times=None)
        self._first: dict[str, Reply] = {}
        self.num_fired = 0
        """How often an answer was not the server's own."""

    def wants(self, request: Request) -> bool:
        """Whether it is such a listing; only a stale answer counts as fired."""
        return request.operation == "list" and self.pattern.search(request.key) is not None

    def carry_out(self, exchange: Exchange) -> None:
        """Answer from memory."""
        fresh = exchange.forward()
        with self._lock:
            reply = self._first.setdefault(exchange.request.target, fresh)
            self.num_fired += reply.body != fresh.body
        exchange.answer(reply)


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes requests on to one server.

    A client's connection is one thread here and one connection to the server.
    The server may die and come back: while it is away, connections are cut.
    """

    def __init__(self, endpoint: str) -> None:
        url = urllib.parse.urlsplit(endpoint)
        assert url.hostname is not None
        self._server = url.hostname, url.port or 80
        self._troubles: list[Trouble] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self.num_requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def plan(self, trouble: Trouble) -> Trouble:
        """Have a fault happen to the requests it wants; the one planned first comes first."""
        with self._lock:
            self._troubles.append(trouble)
        return trouble

    def lift(self, trouble: Trouble) -> None:
        """End a fault."""
        with self._lock, contextlib.suppress(ValueError):
            self._troubles.remove(trouble)

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than the proxy lives."""
        self._closed.wait(seconds)

    def close(self) -> None:
        """Stop; connections that are open are cut."""
        self._closed.set()
        # A thread in accept() would keep the port open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            left = list(self._sockets)
        for each in left:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(_TIMEOUT_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets.add(client)
        server = http.client.HTTPConnection(*self._server, timeout=_TIMEOUT_S)
        try:
            with client, client.makefile("rb") as stream:
                while not self._closed.is_set():
                    request = read_request(stream)
                    if request is None:
                        return
                    self._handle(Exchange(self, client, stream, server, request))
        except CutError:
            pass
        except (OSError, http.client.HTTPException, ValueError):
            # The client or the server has gone: the other side sees a cut connection.
            pass
        finally:
            server.close()
            with self._lock:
                self._sockets.discard(client)

    def _handle(self, exchange: Exchange) -> None:
        with self._lock:
            self.num_requests += 1
            troubles = list(self._troubles)
        trouble = next((each for each in troubles if each.wants(exchange.request)), _NONE)
        trouble.carry_out(exchange)


_NONE = Trouble()


class Exchange:
    """One request on its way through the proxy."""

    def __init__(
        self,
        proxy: Proxy,
        client: socket.socket,
        stream: BinaryIO,
        server: http.client.HTTPConnection,
        request: Request,
    ) -> None:
        self.proxy = proxy
        self.request = request
        self._client = client
        self._stream = stream
        self._server = server
        self._body: bytes | None = None

    def read_body(self, share: float = 1.0) -> bytes:
        """Return the request's body, or only the first ``share`` of it."""
        if self._body is None:
            if self.request.header("expect").lower() == "100-continue":
                self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if self.request.header("transfer-encoding").lower() == "chunked":
                self._body = _read_chunks(self._stream)
            else:
                length = int(self.request.header("content-length") or 0)
                self._body = _read_exactly(self._stream, int(length * share))
        return self._body

    def forward(self) -> Reply:
        """Have the server do it and return its answer."""
        body = self.read_body()
        request = self.request
        try:
            self._server.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers:
                if name.lower() not in ("expect", *_HOP_HEADERS):
                    self._server.putheader(name, value)
            if body or request.method in ("PUT", "POST"):
                self._server.putheader("Content-Length", str(len(body)))
            self._server.endheaders(body or None)
            answer = self._server.getresponse()
            reply = Reply(answer.status, answer.getheaders(), answer.read())
        except (OSError, http.client.HTTPException):
            self._server.close()
            raise
        return reply

    def answer(self, reply: Reply, num_body_bytes: int | None = None) -> None:
        """Send a reply, or all of its headers and so many bytes of its body."""
        lines = [f"HTTP/1.1 {reply.status} {http.client.responses.get(reply.status, '')}"]
        is_head = self.request.method == "HEAD"
        kept = [(n, v) for n, v in reply.headers if n.lower() not in _HOP_HEADERS]
        length = next((v for n, v in reply.headers if n.lower() == "content-length"), None)
        if not is_head:
            length = None if reply.status in (204, 304) else str(len(reply.body))
        if length is not None:
            kept.append(("Content-Length", length))
        head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in kept), "", ""])
        body = b"" if is_head else reply.body[:num_body_bytes]
        self._client.sendall(head.encode("latin-1") + body)

    def cut(self) -> NoReturn:
        """Cut the client's connection off with a reset, not with an orderly end."""
        with contextlib.suppress(OSError):
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise CutError


def error_reply(status: int, code: str) -> Reply:
    """Return an error as S3 gives it."""
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    )
    return Reply(status, [("Content-Type", "application/xml")], text.encode())


def read_request(stream: BinaryIO) -> Request | None:
    """Read the head of a request; None when the client has closed."""
    first = _read_line(stream)
    if not first:
        return None
    method, target, _ = first.split(" ", 2)
    headers = []
    while line := _read_line(stream):
        name, _, value = line.partition(":")
        headers.append((name.strip(), value.strip()))
    operation, key = classify(method, target)
    request = Request(method, target, headers, operation, key, "")
    found = re.search(r"Credential=([^/]+)/", request.header("authorization"))
    request.access_key = found[1] if found else ""
    return request


def classify(method: str, target: str) -> tuple[str, str]:
    """Return which operation a request is, and what it is about."""
    url = urllib.parse.urlsplit(target)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    path = urllib.parse.unquote(url.path).strip("/")
    if method == "GET" and "list-type" in query:
        return "list", f"{path}/{query.get('prefix', '')}"
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}.get(method, "other"), path
    if method == "POST":
        return ("begin" if "uploads" in query else "delete" if "delete" in query else "other"), path
    if query.keys() & {"uploads", "acl", "location", "versioning"}:
        return "other", path
    return {"PUT": "put", "GET": "get", "HEAD": "head", "DELETE": "delete"}.get(method, "other"), path


def _read_line(stream: BinaryIO) -> str:
    line: bytes = stream.readline(_READ_BYTES)
    return line.decode("latin-1").rstrip("\r\n")


def _read_exactly(stream: BinaryIO, length: int) -> bytes:
    data: bytes = stream.read(length)
    if len(data) < length:
        raise ConnectionError("the client has gone")
    return data


def _read_chunks(stream: BinaryIO) -> bytes:
    parts = []
    while size := int(_read_line(stream).partition(";")[0], 16):
        parts.append(_read_exactly(stream, size))
        _read_line(stream)
    while _read_line(stream):
        pass
    return b"".join(parts)


def wait_for_firing(trouble: Trouble, deadline_s: float = 30.0) -> bool:
    """Wait until a fault has happened; return whether it has."""
    end_s = time.monotonic() + deadline_s
    while trouble.num_fired == 0:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True
