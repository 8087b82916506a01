"""When a call is tried again, and for how long: by a clock we turn by hand."""

import errno
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from botocore import exceptions as boto
from hypothesis import given
from hypothesis import strategies as st

from raycheck.errors import (
    ConfigError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
)
from raycheck.store.failures import judge, to_storage_error
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy, Verdict, run_with_retries
from raycheck.testing import s3_error


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.now_s = 0.0
        self.waits_s = []

    def sleep(self, seconds):
        self.waits_s.append(seconds)
        self.now_s += seconds


def run(attempt, policy, clock, verdict=Verdict.RETRY, refresh=lambda: None, jitter=0.5):
    return run_with_retries(
        attempt,
        policy=policy,
        judge=lambda error: verdict,
        refresh=refresh,
        sleep=clock.sleep,
        clock=lambda: clock.now_s,
        random=lambda: jitter,
        on_retry=lambda verdict, error, elapsed_s: None,
    )


@given(num_failures=st.integers(1, 2000), elapsed_s=st.floats(0, 200), jitter=st.floats(0, 0.999))
def test_delays_stay_within_their_bounds(num_failures, elapsed_s, jitter):
    """A wait is never longer than allowed and never leads past the budget."""
    policy = RetryPolicy(budget_s=100, first_delay_s=0.5, max_delay_s=8)
    wait_s = policy.delay_s(num_failures=num_failures, elapsed_s=elapsed_s, jitter=jitter)
    if wait_s is None:
        assert elapsed_s + 8 > 100
    else:
        assert 0.25 <= wait_s <= 8
        assert elapsed_s + wait_s <= 100


def test_a_fault_of_twenty_seconds_is_survived():
    """Waits double up to the limit until the store answers."""
    clock = Clock()

    def attempt():
        if clock.now_s < 20:
            raise OSError("busy")
        return "done"

    assert run(attempt, RetryPolicy(), clock) == "done"
    assert clock.waits_s[:4] == pytest.approx([0.15, 0.3, 0.6, 1.2])
    assert clock.now_s < 30


def test_a_lasting_fault_ends_within_the_budget():
    """The last failure is raised when the budget is used up."""
    clock = Clock()
    with pytest.raises(OSError, match="busy"):
        run(lambda: (_ for _ in ()).throw(OSError("busy")), RetryPolicy(budget_s=30), clock)
    assert 15 < clock.now_s <= 30


def test_jitter_spreads_clients():
    """Two clients that failed together do not come back together."""
    policy = RetryPolicy()
    waits = {policy.delay_s(num_failures=3, elapsed_s=0, jitter=jitter) for jitter in (0.0, 0.3, 0.9)}
    assert len(waits) == 3


def test_credentials_are_looked_for_a_limited_number_of_times():
    """Credentials that stay expired are no endless loop."""
    refreshes = []
    with pytest.raises(OSError, match="expired"):
        run(
            lambda: (_ for _ in ()).throw(OSError("expired")),
            RetryPolicy(max_refreshes=2),
            Clock(),
            verdict=Verdict.REFRESH,
            refresh=lambda: refreshes.append(1),
        )
    assert len(refreshes) == 2


ENDPOINT = {"endpoint_url": "http://x", "error": "e"}


@pytest.mark.parametrize(
    ("error", "verdict", "mapped"),
    [
        (s3_error("SlowDown", 503), Verdict.RETRY, StorageError),
        (s3_error("InternalError", 500), Verdict.RETRY, StorageError),
        (s3_error("Unheard", 502), Verdict.RETRY, StorageError),
        (s3_error("RequestTimeout", 400), Verdict.RETRY, StorageError),
        (s3_error("BadDigest", 400), Verdict.RETRY, StorageError),
        (s3_error("ExpiredToken", 400), Verdict.REFRESH, StoragePermissionError),
        (s3_error("AccessDenied", 403), Verdict.GIVE_UP, StoragePermissionError),
        (s3_error("InvalidAccessKeyId", 403), Verdict.GIVE_UP, StoragePermissionError),
        (s3_error("SignatureDoesNotMatch", 403), Verdict.GIVE_UP, StoragePermissionError),
        (s3_error("NoSuchKey", 404), Verdict.GIVE_UP, ObjectNotFoundError),
        (s3_error("404", 404), Verdict.GIVE_UP, ObjectNotFoundError),
        (s3_error("NoSuchBucket", 404), Verdict.GIVE_UP, ConfigError),
        (s3_error("InvalidRequest", 400), Verdict.GIVE_UP, StorageError),
        (boto.EndpointConnectionError(**ENDPOINT), Verdict.RETRY, StorageError),
        (boto.ConnectTimeoutError(**ENDPOINT), Verdict.RETRY, StorageError),
        (boto.ReadTimeoutError(**ENDPOINT), Verdict.RETRY, StorageError),
        (boto.ConnectionClosedError(**ENDPOINT), Verdict.RETRY, StorageError),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), Verdict.RETRY, StorageError),
        (boto.NoCredentialsError(), Verdict.GIVE_UP, StoragePermissionError),
        (boto.ProfileNotFound(profile="p"), Verdict.GIVE_UP, ConfigError),
        (ConnectionResetError("reset"), Verdict.RETRY, StorageError),
        (TimeoutError("slow"), Verdict.RETRY, StorageError),
        (OSError(errno.EBUSY, "busy"), Verdict.RETRY, StorageError),
        (OSError(errno.ENOSPC, "full"), Verdict.GIVE_UP, StorageError),
        (OSError(errno.EROFS, "read-only"), Verdict.GIVE_UP, StoragePermissionError),
        (PermissionError(errno.EACCES, "no"), Verdict.GIVE_UP, StoragePermissionError),
        (FileNotFoundError(errno.ENOENT, "no"), Verdict.GIVE_UP, ObjectNotFoundError),
        (ValueError("odd"), Verdict.GIVE_UP, StorageError),
    ],
    ids=lambda value: getattr(value, "name", None) or repr(value)[:40],
)
def test_errors_mean_one_thing(error, verdict, mapped):
    """Each error of a library is judged and becomes ours, also when fsspec has wrapped it."""
    wrapped = OSError(errno.EINVAL, "wrapped")
    wrapped.__cause__ = error
    for each in (error, wrapped):
        assert judge(each) is verdict
        ours = to_storage_error(each, operation="write", url="s3://b/p", key="a/b")
        assert type(ours) is mapped
        assert "s3://b/p" in str(ours)


def test_our_own_errors_pass():
    """What is already ours is neither retried nor renamed."""
    error = CorruptCheckpointError("bad")
    assert judge(error) is Verdict.GIVE_UP
    assert to_storage_error(error, operation="read", url="u", key="k") is error


class Throttling(BaseHTTPRequestHandler):
    """Answers 503 SlowDown to the first ``left`` requests, then 200."""

    protocol_version = "HTTP/1.1"
    left = 0
    num_requests = 0

    def do_PUT(self):
        cls = type(self)
        self.rfile.read(int(self.headers["Content-Length"]))
        cls.num_requests += 1
        fails = cls.num_requests <= cls.left
        body = b"<Error><Code>SlowDown</Code><Message>reduce</Message></Error>" if fails else b""
        self.send_response(503 if fails else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def throttling():
    handler = type("Handler", (Throttling,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_one_layer_of_retries(throttling):
    """A throttling server sees one request per attempt of ours: the library adds none."""
    handler, endpoint = throttling
    handler.left = 3
    waits_s = []
    options = {"endpoint_url": endpoint, "key": "a", "secret": "b"}
    store = Store("s3://bucket/p", options, sleep=waits_s.append)
    store.put("a", b"x")
    assert handler.num_requests == 4
    assert store.num_retries == len(waits_s) == 3
