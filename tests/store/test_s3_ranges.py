"""Ranged reads from servers that answer them otherwise than S3 does: the right bytes or an error, never others."""

from __future__ import annotations

import http.server
import threading

import pytest

from raycheck.errors import ObjectNotFoundError, StorageError
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.s3 import wanted_bytes

DATA = bytes(range(200))


class _Handler(http.server.BaseHTTPRequestHandler):
    """Sends what the test has put into ``answer``: status, Content-Range or None, body, length to announce."""

    def do_GET(self):
        status, content_range, body, length = self.server.answer
        self.server.ranges.append(self.headers.get("Range"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"x"')
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """A server on a free port of 127.0.0.1 that answers every GET alike."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.ranges = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def store(server):
    options = {"key": "a" * 16, "secret": "b" * 16, "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
    return Store(
        "s3://bucket/run", options, retry=RetryPolicy(budget_s=0.2, first_delay_s=0.001, max_delay_s=0.01)
    )


@pytest.mark.parametrize(
    ("status", "content_range", "body", "offset", "expected"),
    [
        pytest.param(206, "bytes 50-99/200", DATA[50:100], 50, DATA[50:100], id="as S3 does"),
        pytest.param(200, "bytes 50-99/200", DATA[50:100], 50, DATA[50:100], id="as rclone does"),
        pytest.param(206, "bytes 180-199/200", DATA[180:], 180, DATA[180:], id="up to the end"),
        pytest.param(206, "bytes 180-199/*", DATA[180:], 180, DATA[180:], id="size not told"),
        pytest.param(200, None, DATA, 0, DATA[:50], id="the whole, cut to its beginning"),
        pytest.param(200, None, DATA[:20], 0, DATA[:20], id="the whole, shorter than the range"),
        pytest.param(200, None, DATA, 50, None, id="the whole in the place of a part"),
        pytest.param(206, None, DATA[50:100], 50, None, id="a part that does not say which"),
        pytest.param(206, "bytes 0-49/200", DATA[:50], 50, None, id="another part"),
        pytest.param(206, "bytes 50-99/200", DATA[50:90], 50, None, id="fewer bytes than it says"),
        pytest.param(
            206, "bytes 50-59/200", DATA[50:60], 50, None, id="less than asked for, and not the end"
        ),
        pytest.param(206, "items 50-99/200", DATA[50:100], 50, None, id="another unit"),
        pytest.param(206, "bytes */200", DATA[50:100], 50, None, id="no range"),
    ],
)
def test_a_part_is_what_it_says_it_is(server, store, status, content_range, body, offset, expected):
    """Fifty bytes are asked for; an answer that is no part of the object at that place is an error."""
    server.answer = status, content_range, body, None
    if expected is None:
        with pytest.raises(StorageError, match="server"):
            store.get_range("k", offset, 50)
    else:
        assert store.get_range("k", offset, 50) == expected
    assert server.ranges == [f"bytes={offset}-{offset + 49}"]


def test_an_answer_that_breaks_off_is_tried_again_and_never_taken_as_the_end(server, store):
    """A connection that is lost is no short object."""
    server.answer = 206, "bytes 50-99/200", DATA[50:80], 50
    with pytest.raises(StorageError) as caught:
        store.get_range("k", 50, 50)
    assert not isinstance(caught.value, ObjectNotFoundError)
    assert len(server.ranges) > 1


def test_numbers_of_any_length_are_no_trouble():
    """A header is a server's text: it may say anything."""
    with pytest.raises(OSError, match="the server sent"):
        wanted_bytes("bytes " + "9" * 5000 + "-1/1", 1, offset=0, length=1)
