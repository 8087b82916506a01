"""Uploads and downloads: memory, limits, cancelling, and what is refused."""

import os
import threading

import pytest

from raycheck.errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from raycheck.store.backend import PartLimits
from raycheck.store.checksum import sums_of
from raycheck.store.download import download
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.spans import Read
from raycheck.store.transfer import TokenBucket, TransferCancelledError
from raycheck.store.upload import Mapping, upload
from raycheck.testing import CutParts, FailNth, Fault, FaultyConnect, LoseReply

FAST = RetryPolicy(budget_s=5.0, first_delay_s=0.001, max_delay_s=0.01)
SMALL_PARTS = CutParts(PartLimits(min_part_bytes=1, default_part_bytes=1000))


class CountReads(Fault):
    """Counts requests."""

    def before(self, operation, key):
        self.fired()


@pytest.fixture
def destination():
    descriptor = os.memfd_create("test-destination")
    yield descriptor
    os.close(descriptor)


def send(store, source, size_bytes, cancelled, **options):
    arguments = {"chunk_bytes": 500, "parallel_parts": 2, **options}
    return upload(store, "shard", source, size_bytes=size_bytes, cancelled=cancelled, **arguments)


def test_progress_adds_up_to_the_size(local_place, make_source, never):
    """Every byte is told of once."""
    source, data = make_source(4321)
    store = Store(local_place.url, connect=FaultyConnect(SMALL_PARTS))
    told = []
    send(store, source, len(data), never, on_progress=told.append)
    assert sum(told) == 4321
    assert len(told) == 5


def test_a_source_that_ends_early_is_an_error(local_place, make_source, never):
    """Nothing is stored of a source that is shorter than announced."""
    source, _ = make_source(100)
    with pytest.raises(StorageError, match="ends at byte 100"):
        send(Store(local_place.url), source, 200, never)
    assert local_place.keys() == []


def test_a_source_is_mapped_once_and_again_when_it_has_grown(make_source):
    """What was written to it meanwhile shows; nothing is mapped beyond its end."""
    source, data = make_source(8192)
    mapping = Mapping()
    first = mapping.view(source, 100)
    os.pwrite(source, b"new", 0)
    assert mapping.view(source, 8192) is first
    assert bytes(first) == b"new" + data[3:]
    with pytest.raises(StorageError, match="ends at byte 8192, before 8193"):
        mapping.view(source, 8193)
    os.pwrite(source, b"more", 8192)
    assert bytes(mapping.view(source, 8196)[8192:]) == b"more"
    assert bytes(first[:3]) == b"new"


def test_a_failing_progress_listener_leaves_nothing(local_place, make_source, never):
    """Whatever goes wrong in between, the temporary file is removed."""
    source, data = make_source(5000)
    store = Store(local_place.url, connect=FaultyConnect(SMALL_PARTS))

    def fail(num_bytes):
        raise RuntimeError("listener")

    with pytest.raises(RuntimeError, match="listener"):
        send(store, source, len(data), never, on_progress=fail)
    assert local_place.keys() == []


def test_cancelling_ends_waits(local_place, make_source):
    """A cancelled upload does not wait for its turn in the bandwidth limit."""
    source, data = make_source(5000)
    cancelled = threading.Event()
    store = Store(local_place.url, connect=FaultyConnect(SMALL_PARTS))
    with pytest.raises(TransferCancelledError, match="shard"):
        send(store, source, len(data), cancelled, bytes_per_s=1.0, on_progress=lambda _: cancelled.set())
    assert local_place.keys() == []


def test_the_rate_limit_is_kept():
    """By a clock turned by hand: any number of takers, one mean rate."""
    bucket = TokenBucket(100.0)
    assert bucket.reserve(50, now_s=10.0) == 0
    assert bucket.reserve(100, now_s=10.0) == pytest.approx(0.5)
    assert bucket.reserve(10, now_s=10.2) == pytest.approx(1.3)
    assert bucket.reserve(10, now_s=20.0) == 0
    with pytest.raises(ValueError, match="bytes_per_s"):
        TokenBucket(0)


def test_a_shared_rate_limit_slows_uploads(local_place, make_source, never):
    """Two uploads share one bucket and sleep for it."""
    source, data = make_source(2000)
    bucket = TokenBucket(20_000.0)
    store = Store(local_place.url, connect=FaultyConnect(SMALL_PARTS))
    for _ in range(2):
        send(store, source, len(data), never, bytes_per_s=bucket)
    assert bucket.reserve(1, now_s=0.0) > 0.1  # 4,000 bytes have been booked
    assert local_place.read("shard") == data


@pytest.mark.parametrize("operation", ["begin", "part", "complete", "size"])
def test_a_lost_reply_is_made_good(place, make_source, never, operation):
    """A call that was done but failed is done again, or found to be done."""
    fault = LoseReply(1, operation)
    part_bytes = 5 << 20 if place.url.startswith("s3") else 1000
    limits = CutParts(PartLimits(min_part_bytes=1, default_part_bytes=part_bytes))
    store = Store(place.url, place.options, retry=FAST, connect=FaultyConnect(limits, fault))
    source, data = make_source(part_bytes + 5)
    send(store, source, len(data), never, chunk_bytes=part_bytes // 2)
    assert fault.num_fired == 1
    assert place.read("shard") == data


def test_interleaved_and_repeated_reads_fetch_a_chunk_once(place, destination, never):
    """Two regions of one chunk cost one request, and land in their places."""
    data = bytes(range(256)) * 40
    place.write("shard", data)
    count = CountReads("read")
    store = Store(place.url, place.options, connect=FaultyConnect(count))
    reads = [Read(10, 20, 500), Read(40, 20, 0), Read(20, 30, 200), Read(5000, 300, 1000), Read(10, 20, 900)]
    told = []
    download(
        store,
        "shard",
        reads,
        destination,
        sums=sums_of(data, 1000),
        parallel=2,
        cancelled=never,
        on_progress=told.append,
    )
    for read in reads:
        want = data[read.source_offset : read.source_offset + read.length]
        assert os.pread(destination, read.length, read.destination_offset) == want
    assert count.num_fired == 2
    assert sum(told) == 2000


def test_windows_are_read_in_parallel_and_verified(place, destination, never):
    """Many windows, all right."""
    data = os.urandom(10_000)
    place.write("shard", data)
    store = Store(place.url, place.options)
    sums = sums_of(data, 100)
    download(
        store,
        "shard",
        [Read(0, 10_000, 7)],
        destination,
        sums=sums,
        parallel=4,
        cancelled=never,
        window_bytes=700,
    )
    assert os.pread(destination, 10_000, 7) == data


def test_without_sums_exactly_the_ranges_are_read(place, destination, never):
    """Nothing is verified, and nothing more is fetched."""
    data = os.urandom(1000)
    place.write("shard", data)
    told = []
    reads = [Read(10, 5, 0), Read(500, 7, 5)]
    download(
        Store(place.url, place.options),
        "shard",
        reads,
        destination,
        sums=None,
        parallel=1,
        cancelled=never,
        on_progress=told.append,
    )
    assert os.pread(destination, 12, 0) == data[10:15] + data[500:507]
    assert sum(told) == 12


@pytest.mark.parametrize("damage", ["flip", "cut", "empty tail"])
def test_a_damaged_object_is_corrupt_by_name(place, destination, never, damage):
    """A changed or missing byte is found before anything of its chunk is written."""
    data = bytearray(os.urandom(5000))
    sums = sums_of(data, 1000)
    if damage == "flip":
        data[3210] ^= 1
    else:
        data = data[: 3210 if damage == "cut" else 3000]
    place.write("shard", bytes(data))
    store = Store(place.url, place.options, retry=FAST)
    reads = [Read(3100, 10, 0)]
    with pytest.raises(CorruptCheckpointError, match="shard") as caught:
        download(store, "shard", reads, destination, sums=sums, parallel=1, cancelled=never)
    assert caught.value.key == "shard"
    assert os.fstat(destination).st_size == 0
    download(store, "shard", [Read(2999, 1, 0)], destination, sums=sums, parallel=1, cancelled=never)


def test_a_read_outside_the_object_is_corrupt(place, destination, never):
    """A layout that asks for more than there is cannot be right."""
    place.write("shard", b"x" * 100)
    with pytest.raises(CorruptCheckpointError, match="outside"):
        download(
            Store(place.url, place.options),
            "shard",
            [Read(90, 11, 0)],
            destination,
            sums=sums_of(b"x" * 100, 10),
            parallel=1,
            cancelled=never,
        )


def test_a_missing_object_is_not_found(place, destination, never):
    """Missing is told apart from damaged."""
    with pytest.raises(ObjectNotFoundError, match="shard"):
        download(
            Store(place.url, place.options),
            "shard",
            [Read(0, 1, 0)],
            destination,
            sums=sums_of(b"x", 10),
            parallel=1,
            cancelled=never,
        )


def test_a_cancelled_download_stops(local_place, destination):
    """Seen before the next window."""
    data = os.urandom(1000)
    local_place.write("shard", data)
    cancelled = threading.Event()
    with pytest.raises(TransferCancelledError):
        download(
            Store(local_place.url),
            "shard",
            [Read(0, 1000, 0)],
            destination,
            sums=sums_of(data, 100),
            parallel=1,
            cancelled=cancelled,
            on_progress=lambda _: cancelled.set(),
            window_bytes=100,
        )
    assert os.fstat(destination).st_size == 100


def test_reads_are_retried(place, destination, never):
    """A failed range is asked for again."""
    place.write("shard", b"x" * 100)
    fault = FailNth(1, "read", times=2)
    store = Store(place.url, place.options, retry=FAST, connect=FaultyConnect(fault))
    sums = sums_of(b"x" * 100, 10)
    download(store, "shard", [Read(0, 100, 0)], destination, sums=sums, parallel=1, cancelled=never)
    assert fault.num_fired == 2
    assert store.num_retries == 2
