"""A loopback S3 server that throws bodies away: it shows what the client can do.

Speaks as much of S3 as uploads and ranged downloads need, remembers only the
sizes of objects, checks no signature, and serves zeros. ``python -m
benchmarks.discard_s3`` (or this file) prints its port and runs until its
standard input is closed.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import uuid
from urllib.parse import parse_qs, unquote, urlsplit

READ_BYTES = 1 << 20
ZEROS = bytes(1 << 20)


class DiscardServer:
    """Sizes of objects and of parts of open uploads."""

    def __init__(self) -> None:
        self.objects: dict[str, int] = {}
        self.uploads: dict[str, dict[int, int]] = {}

    def answer(
        self, method: str, key: str, query: dict[str, list[str]], size: int
    ) -> tuple[int, bytes, dict]:
        if method == "PUT" and "uploadId" in query:
            self.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = size
            return 200, b"", {"ETag": '"0"'}
        if method == "PUT":
            self.objects[key] = size
            return 200, b"", {"ETag": '"0"'}
        if method == "POST" and "uploads" in query:
            upload_id = uuid.uuid4().hex
            self.uploads[upload_id] = {}
            return 200, _xml("InitiateMultipartUploadResult", UploadId=upload_id, Key=key), {}
        if method == "POST" and "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"][0])
            self.objects[key] = sum(parts.values())
            return 200, _xml("CompleteMultipartUploadResult", Key=key, ETag='"0"'), {}
        if method == "POST" and "delete" in query:
            return 200, _xml("DeleteResult"), {}
        if method == "DELETE":
            self.objects.pop(key, None)
            self.uploads.pop(query.get("uploadId", [""])[0], None)
            return 204, b"", {}
        if method in ("GET", "HEAD") and key.strip("/").count("/") == 0:
            # A bucket: it is there, and nothing is in it.
            return 200, _xml("ListBucketResult", KeyCount="0", IsTruncated="false"), {}
        if key in self.objects:
            return 200, b"", {"Content-Length": str(self.objects[key]), "ETag": '"0"'}
        return 404, b"", {}


class Connection(asyncio.BufferedProtocol):
    """One client: heads and the sizes of chunks are read, bodies are counted and dropped."""

    def __init__(self, server: DiscardServer) -> None:
        self.server = server
        self.buffer = bytearray(READ_BYTES)
        self.text = b""
        self.left = 0  # bytes to drop before there is text again
        self.request: tuple[str, str, dict[str, str]] | None = None

    def connection_made(self, transport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        # asyncio's TLS slices it; a slice of the bytearray itself would be a copy.
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        data = memoryview(self.buffer)[:nbytes]
        while data.nbytes:
            if self.left:
                taken = min(self.left, data.nbytes)
                self.left -= taken
                data = data[taken:]
                if self.left == 0 and not self._is_chunked():
                    self._finish()
                continue
            # A head ends with an empty line, the size of a chunk with its own.
            end = b"\r\n" if self.request else b"\r\n\r\n"
            self.text += bytes(data)
            text, found, rest = self.text.partition(end)
            if not found:
                return
            self.text, data = b"", memoryview(rest)
            if self.request is None:
                self._begin(text.decode("latin-1"))
            elif self._next_chunk(text):
                self._finish()

    def _begin(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.request = (method, target, headers)
        self.in_trailer = False
        if headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._is_chunked():
            self.left = int(headers.get("content-length", "0"))
            if self.left == 0:
                self._finish()

    def _is_chunked(self) -> bool:
        return "chunked" in self.request[2].get("transfer-encoding", "")

    def _next_chunk(self, line: bytes) -> bool:
        """Take a line between chunks; return whether the body has ended."""
        if self.in_trailer:
            return not line
        size = int(line.split(b";")[0], 16)
        self.in_trailer = size == 0
        self.left = size + 2 if size else 0
        return False

    def _finish(self) -> None:
        method, target, headers = self.request
        url = urlsplit(target)
        size = int(headers.get("x-amz-decoded-content-length", headers.get("content-length", "0")))
        self.request = None
        status, body, extra = self.server.answer(
            method, unquote(url.path), parse_qs(url.query, keep_blank_values=True), size
        )
        if method == "GET" and status == 200 and not body:
            self._send_zeros(int(extra["Content-Length"]), headers.get("range", ""))
            return
        extra = {"Content-Length": str(len(body)), **extra}
        body = b"" if method == "HEAD" else body
        lines = [f"HTTP/1.1 {status} x"] + [f"{name}: {value}" for name, value in extra.items()]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def _send_zeros(self, size: int, asked: str) -> None:
        start, end = 0, size - 1
        if asked:
            low, high = asked.removeprefix("bytes=").split("-")
            start, end = int(low), min(int(high or end), end)
        length = end - start + 1
        self.transport.write(
            f'HTTP/1.1 206 x\r\nContent-Length: {length}\r\nETag: "0"\r\n'
            f"Content-Range: bytes {start}-{end}/{size}\r\n\r\n".encode()
        )
        for left in range(length, 0, -len(ZEROS)):
            self.transport.write(ZEROS[:left] if left < len(ZEROS) else ZEROS)


def _xml(name: str, **fields: str) -> bytes:
    inner = "".join(f"<{field}>{value}</{field}>" for field, value in fields.items())
    return f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{name}>'.encode()


async def serve(certificate: str | None) -> None:
    loop = asyncio.get_running_loop()
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    state = DiscardServer()
    server = await loop.create_server(lambda: Connection(state), "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1] if len(sys.argv) > 1 else None))
