"""Networks and servers that misbehave, through the whole of the store's code and a real S3 server."""

from __future__ import annotations

import os
import random
import threading

import pytest

from raycheck.core.sums import ChunkSums
from raycheck.errors import StorageError, StoragePermissionError
from raycheck.store.backend import PartLimits
from raycheck.store.download import download
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.spans import Read
from raycheck.store.upload import upload
from raycheck.testing import CutParts, FaultyConnect
from tests.reliability.proxy import (
    CutReply,
    CutRequest,
    Delay,
    Expire,
    LoseReply,
    Refuse,
    StaleListing,
    Trouble,
)

MIB = 1 << 20
SIZE_BYTES = 12 * MIB
"""Three parts."""

FAST = RetryPolicy(budget_s=5.0, first_delay_s=0.001, max_delay_s=0.01)


@pytest.fixture
def store(url, server, proxy):
    return connect(url, {**server.options, "endpoint_url": proxy.endpoint})


@pytest.fixture
def beside(url, server):
    """The same place, past the proxy."""
    return Store(url, server.options)


@pytest.fixture(scope="module")
def data():
    return random.Random(0).randbytes(SIZE_BYTES)


@pytest.fixture
def source(data):
    descriptor = os.memfd_create("test-source")
    os.write(descriptor, data)
    yield descriptor
    os.close(descriptor)


def connect(url, options):
    parts = CutParts(PartLimits(default_part_bytes=5 * MIB))
    return Store(url, options, retry=FAST, connect=FaultyConnect(parts))


def send(store: Store, source: int) -> ChunkSums:
    return upload(
        store,
        "shard",
        source,
        size_bytes=SIZE_BYTES,
        chunk_bytes=MIB,
        parallel_parts=2,
        cancelled=threading.Event(),
    )


def fetch(store: Store, sums: ChunkSums) -> bytes:
    target = os.memfd_create("test-target")
    try:
        reads = [Read(0, SIZE_BYTES, 0)]
        download(store, "shard", reads, target, sums=sums, parallel=2, cancelled=threading.Event())
        return os.pread(target, SIZE_BYTES, 0)
    finally:
        os.close(target)


UPLOAD_TROUBLES = [
    Delay(0.2, "part", times=2),
    CutRequest("part"),
    CutRequest("part", skip=1, times=2),
    Refuse(503, "SlowDown", times=4),
    Refuse(500, "InternalError", "complete"),
    LoseReply("begin"),
    LoseReply("part", skip=1),
    LoseReply("complete"),
    CutReply("begin"),
    CutReply("complete"),
    Refuse(403, "ExpiredToken", "part", skip=1),
]


@pytest.mark.parametrize(
    "planned", UPLOAD_TROUBLES, ids=lambda each: f"{type(each).__name__}-{each.operations}"
)
def test_an_upload_is_whole_whatever_happens_on_the_way(planned, proxy, store, beside, source, data):
    """It fired, and what is stored is what was sent."""
    trouble = proxy.plan(planned)
    send(store, source)
    assert trouble.num_fired >= 1
    assert beside.get("shard") == data


DOWNLOAD_TROUBLES = [
    Delay(0.2, "get", times=2),
    CutReply("get", times=3),
    LoseReply("get"),
    Refuse(503, "SlowDown", times=4),
    Refuse(403, "ExpiredToken"),
]


@pytest.mark.parametrize(
    "planned", DOWNLOAD_TROUBLES, ids=lambda each: f"{type(each).__name__}-{each.operations}"
)
def test_a_download_is_whole_whatever_happens_on_the_way(planned, proxy, store, beside, source, data):
    """It fired, and what was read is what is stored."""
    sums = send(connect(beside.url, beside._options), source)
    trouble = proxy.plan(planned)
    assert fetch(store, sums) == data
    assert trouble.num_fired >= 1


@pytest.mark.parametrize("trouble", [CutReply("list"), LoseReply("list"), Refuse(503, "SlowDown", "list")])
def test_a_listing_is_whole_or_is_asked_for_again(trouble, proxy, store, beside):
    """Half an answer is none."""
    for number in range(5):
        beside.put(f"some/{number}", b"x")
    proxy.plan(trouble)
    assert store.list_children("some") == ["0", "1", "2", "3", "4"]
    assert trouble.num_fired == 1
    assert store.num_retries == 1


@pytest.mark.parametrize(
    "trouble", [LoseReply("delete"), CutReply("delete"), Refuse(503, "SlowDown", "delete")]
)
def test_a_delete_is_repeated_until_its_answer_is_known(trouble, proxy, store, beside):
    """Done twice is done."""
    beside.put("a", b"x")
    proxy.plan(trouble)
    store.delete(["a"])
    assert trouble.num_fired == 1
    assert beside.list_keys() == []


def test_without_trouble_the_proxy_changes_nothing(proxy, store, beside, source, data):
    """All that the tests of stores do goes through it."""
    before = proxy.num_requests
    store.probe()
    assert fetch(store, send(store, source)) == data
    store.delete(["shard"])
    assert beside.list_keys() == []
    assert store.num_retries == 0
    assert proxy.num_requests > before + 10


class TestCredentials:
    @pytest.fixture
    def write_credentials(self, tmp_path, monkeypatch):
        """Write the file that credentials are read from; what renews them does the same."""
        path = tmp_path / "credentials"
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)

        def write(options):
            path.write_text(
                f"[default]\naws_access_key_id = {options['key']}\naws_secret_access_key = {options['secret']}\n"
            )

        return write

    def test_new_ones_are_found_in_the_middle_of_an_upload(
        self, write_credentials, server, proxy, url, beside, source, data
    ):
        """The old ones are refused from the second part on; those that the file has now do."""
        write_credentials(server.options)
        store = connect(url, {"endpoint_url": proxy.endpoint})
        store.put("before", b"x")
        trouble = proxy.plan(Expire("part", skip=1))
        write_credentials(server.other_options)
        send(store, source)
        assert trouble.num_fired >= 1
        assert store.num_refreshes >= 1
        assert beside.get("shard") == data

    def test_without_new_ones_the_upload_fails_and_leaves_nothing(
        self, write_credentials, server, proxy, url, beside, source
    ):
        """After a few looks, with an error that says what to mend, and no object."""
        write_credentials(server.options)
        store = connect(url, {"endpoint_url": proxy.endpoint})
        trouble = proxy.plan(Expire("part", skip=1))
        with pytest.raises(StoragePermissionError, match=r"shard.*ExpiredToken"):
            send(store, source)
        assert trouble.num_fired >= 4
        assert beside.list_keys() == []

    def test_ones_that_may_only_read_are_refused_at_the_start(self, server, url):
        """The probe names the permission, and nothing is tried twice."""
        store = Store(url, server.reader_options, retry=FAST)
        assert store.list_keys() == []
        with pytest.raises(StoragePermissionError, match=r"write .*permission refused.*AccessDenied"):
            store.probe()
        assert store.num_retries == 0


def test_writes_that_are_denied_are_not_tried_again(proxy, store):
    """Retrying does not help: the caller hears of it at once."""
    trouble = proxy.plan(Refuse(403, "AccessDenied", "put", times=None))
    with pytest.raises(StoragePermissionError, match=r"cannot write .*/a: permission refused"):
        store.put("a", b"x")
    assert trouble.num_fired == 1


def test_a_server_that_only_says_slow_down_is_given_up_in_time(proxy, store):
    """The budget of the call ends it, with the server's own words."""
    trouble = proxy.plan(Refuse(503, "SlowDown", "put", times=None))
    impatient = Store(store.url, store._options, retry=RetryPolicy(budget_s=0.5, first_delay_s=0.01))
    with pytest.raises(StorageError, match="SlowDown"):
        impatient.put("a", b"x")
    assert trouble.num_fired > 2


@pytest.mark.parametrize("was_used_before", [False, True])
def test_a_store_whose_listings_are_stale_is_refused(was_used_before, proxy, store, beside):
    """Also one that is new to whatever keeps the listings."""
    trouble = proxy.plan(StaleListing())
    if was_used_before:
        store.list_keys("raycheck-probe")
    with pytest.raises(StorageError, match=r"listing does not show it.*whose listings are consistent"):
        store.probe()
    assert trouble.num_fired >= 1
    assert beside.list_keys() == [], "the probe leaves nothing behind"


def test_a_trouble_happens_as_often_as_planned(proxy, store):
    """Skipped ones, those that fire and those after are told apart, by operation and key."""
    trouble = proxy.plan(Trouble("put", key="/b", skip=1, times=2))
    for key in ("a", "b/1", "b/2", "a", "b/3", "b/4"):
        store.put(key, b"x")
    assert trouble.num_fired == 2
    assert trouble.is_spent
