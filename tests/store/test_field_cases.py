"""Failures that people met with other libraries, each with the right behaviour."""

from __future__ import annotations

import ast
import asyncio
import os
import random
import signal
import socket
import threading
import time
import traceback
import uuid
from pathlib import Path

import fsspec
import pytest

import raycheck.store
from raycheck.errors import ConfigError, ObjectNotFoundError, StorageError, StoragePermissionError
from raycheck.store.backend import PartLimits
from raycheck.store.checksum import sums_of
from raycheck.store.download import download
from raycheck.store.generic import FsspecBackend
from raycheck.store.local import LocalBackend
from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy
from raycheck.store.spans import Read
from raycheck.store.upload import upload
from raycheck.testing import (
    BufferedFileSystem,
    CutParts,
    DropLastBuffer,
    ExpireCredentials,
    FailNth,
    FailSome,
    Fault,
    FaultyConnect,
    FullDisk,
    LoseReply,
    RejectEmpty,
    Slow,
    StaleListing,
    s3_error,
)

MIB = 1 << 20
PART = 5 * MIB
FAST = RetryPolicy(budget_s=5.0, first_delay_s=0.001, max_delay_s=0.01)
SMALL_PARTS = CutParts(PartLimits(min_part_bytes=1, default_part_bytes=1000))
S3_PARTS = CutParts(PartLimits(default_part_bytes=PART))
DEADLINE_S = 20.0


def send(store, source, size_bytes, cancelled=None, key="shard", chunk_bytes=500, **options):
    return upload(
        store,
        key,
        source,
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
        parallel_parts=2,
        cancelled=cancelled or threading.Event(),
        **options,
    )


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)  # between two looks
    raise AssertionError("the deadline passed")


class TestA3RemoteStreamsAreNotFiles:
    def test_a_stream_without_a_descriptor_is_whole(self, make_source):
        """A file system that buffers until close and has no fileno stores the object whole."""
        file_system = BufferedFileSystem()
        store = Store("memory://a3", connect=lambda place, _: _small(FsspecBackend, place, file_system))
        source, data = make_source(4500)
        send(store, source, len(data))
        assert file_system.cat_file("/a3/shard") == data
        assert store.list_keys() == [("shard", 4500)]

    def test_a_stream_that_drops_its_end_is_found_out(self, make_source):
        """The stored size disagrees: an error names the object, and it is deleted."""
        file_system = BufferedFileSystem(drop_bytes=7)
        store = Store("memory://a3", connect=lambda place, _: _small(FsspecBackend, place, file_system))
        source, data = make_source(4500)
        with pytest.raises(StorageError, match=r"shard was stored with 4493 bytes where 4500"):
            send(store, source, len(data))
        assert file_system.num_fired == 1
        assert file_system.find("/") == []

    @pytest.mark.parametrize("size_bytes", [900, 2500])
    def test_a_dropped_last_buffer_is_found_out_everywhere(self, place, make_source, size_bytes):
        """The same on every store."""
        fault = DropLastBuffer()
        limits = [] if place.url.startswith("s3") else [SMALL_PARTS]
        store = Store(place.url, place.options, connect=FaultyConnect(*limits, fault))
        source, _ = make_source(size_bytes)
        with pytest.raises(StorageError, match="shard") as caught:
            send(store, source, size_bytes)
        assert fault.num_fired == 1
        assert caught.value.key == "shard"
        assert place.keys() == []


def _small(backend, place, file_system):
    made = backend(place, {}, make=lambda **options: file_system)
    made.limits = SMALL_PARTS.limits
    return made


def test_a5_nothing_empty_is_ever_written(place, make_source):
    """A store that refuses empty objects and parts is never asked for one."""
    fault = RejectEmpty()
    limits = [S3_PARTS] if place.url.startswith("s3") else [SMALL_PARTS]
    store = Store(place.url, place.options, connect=FaultyConnect(*limits, fault))
    part_bytes = limits[0].limits.default_part_bytes
    source, data = make_source(2 * part_bytes)
    for size_bytes in (1, part_bytes, 2 * part_bytes):
        send(store, source, size_bytes, chunk_bytes=part_bytes)
        assert place.read("shard") == data[:size_bytes]
    store.put("manifest.json", b"{}")
    store.probe()
    with pytest.raises(ValueError, match="no empty objects"):
        send(store, source, 0)
    assert fault.num_calls >= 6
    assert fault.num_fired == 0


class TestB1ListingsAreFresh:
    def test_another_writer_is_seen_at_once(self, place):
        """A handle that has listed an empty folder finds what others wrote, whole, at first try."""
        ours, theirs = (Store(place.url, place.options) for _ in range(2))
        assert ours.list_keys() == []
        assert ours.list_children("checkpoints") == []
        theirs.put("checkpoints/5/manifest.json", b"short")
        assert ours.list_children("checkpoints") == ["5"]
        assert ours.get("checkpoints/5/manifest.json") == b"short"
        theirs.put("checkpoints/5/manifest.json", b"a longer one")
        assert ours.list_keys() == [("checkpoints/5/manifest.json", 12)]
        assert ours.size_bytes("checkpoints/5/manifest.json") == 12
        assert ours.get("checkpoints/5/manifest.json") == b"a longer one"
        theirs.delete(["checkpoints/5/manifest.json"])
        assert ours.list_children("checkpoints") == []

    def test_the_users_own_file_system_is_left_alone(self, s3_place):
        """A file system that the user made keeps its listing cache and its place in fsspec's."""
        theirs = fsspec.filesystem("s3", **s3_place.options)
        before = dict(type(theirs)._cache)
        Store(s3_place.url, s3_place.options).put("a", b"x")
        assert theirs.dircache.use_listings_cache
        assert fsspec.filesystem("s3", **s3_place.options) is theirs
        assert dict(type(theirs)._cache) == before


class TestC5DeletesDelayNothing:
    def test_slow_deletes_do_not_delay_writes(self, place):
        """While a delete takes long, writes go on."""
        fault = Slow(1.5, "delete")
        store = Store(place.url, place.options, connect=FaultyConnect(fault))
        store.put("old", b"x")
        deleting = threading.Thread(target=store.delete, args=(["old"],))
        deleting.start()
        wait_for(lambda: fault.num_fired)
        started_s = time.monotonic()
        for number in range(5):
            store.put(f"new/{number}", b"x")
        assert time.monotonic() - started_s < 1.2
        assert deleting.is_alive()
        deleting.join()
        assert fault.num_fired == 1
        assert len(place.keys()) == 5

    def test_a_failed_delete_is_an_error_of_its_own(self, place):
        """It is reported to whoever deletes, and can be done later."""
        fault = FailNth(1, "delete", error=lambda: s3_error("AccessDenied", 403))
        store = Store(place.url, place.options, connect=FaultyConnect(fault))
        store.put("old", b"x")
        with pytest.raises(StoragePermissionError, match="delete"):
            store.delete(["old"])
        store.delete(["old"])
        assert fault.num_fired == 1
        assert place.keys() == []


def test_h4_a_forked_child_uses_the_store(place):
    """A store that the parent has used works in a forked child, and in the parent afterwards."""
    store = Store(place.url, place.options)
    store.put("a", b"from the parent")
    pid = os.fork()
    if pid == 0:
        # No test machinery in here: whatever happens, this process ends.
        try:
            right = store.get("a") == b"from the parent"
            if not place.url.startswith("memory"):
                store.put("b", b"from the child")
            os._exit(0 if right else 1)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(2)
    try:
        _, status = wait_for(lambda: (found := os.waitpid(pid, os.WNOHANG))[0] and found)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    assert os.waitstatus_to_exitcode(status) == 0
    if not place.url.startswith("memory"):
        assert store.get("b") == b"from the child"
    assert store.get("a") == b"from the parent"


class TestH5EventLoops:
    def test_calls_in_threads_leave_a_loop_free(self, place):
        """While one call waits in a thread, 64 others are answered."""
        fault = Held("read")
        place.write("a", b"x")
        store = Store(place.url, place.options, connect=FaultyConnect(fault))

        async def answer(number):
            await asyncio.sleep(0)
            return number

        async def scene():
            slow = asyncio.create_task(asyncio.to_thread(store.get, "a"))
            await asyncio.to_thread(wait_for, lambda: fault.num_fired)
            answers = await asyncio.gather(*(answer(number) for number in range(64)))
            assert not slow.done()
            fault.let_go.set()
            return answers, await slow

        answers, data = asyncio.run(scene())
        assert answers == list(range(64))
        assert data == b"x"

    def test_a_call_inside_a_loop_works(self, place):
        """It blocks the loop, as documented, but there is no 'running loop' error."""
        place.write("a", b"x")
        store = Store(place.url, place.options)

        async def scene():
            store.put("b", b"y")
            return store.get("a"), store.list_children()

        assert asyncio.run(scene()) == (b"x", ["a", "b"])


class TestI1Throttling:
    def test_throttling_is_waited_out(self, place, make_source):
        """503s at the start of every kind of call: the same upload goes through."""
        faults = [FailNth(1, operation, times=3) for operation in ("begin", "part", "complete", "size")]
        limits = S3_PARTS if place.url.startswith("s3") else SMALL_PARTS
        store = Store(place.url, place.options, connect=FaultyConnect(limits, *faults), retry=FAST)
        size_bytes = limits.limits.default_part_bytes * 2 + 1
        source, data = make_source(size_bytes)
        send(store, source, size_bytes, chunk_bytes=limits.limits.default_part_bytes)
        assert [fault.num_fired for fault in faults] == [3, 3, 3, 3]
        assert store.num_retries >= 9
        assert place.read("shard") == data

    def test_a_lasting_fault_is_one_error(self, place):
        """After the budget, an error that says what the store said; then the store works again."""
        fault = FailNth(1, "write", times=10_000)
        policy = RetryPolicy(budget_s=0.05, first_delay_s=0.001, max_delay_s=0.01)
        store = Store(place.url, place.options, retry=policy, connect=FaultyConnect(fault))
        with pytest.raises(StorageError, match=r"cannot write .*SlowDown") as caught:
            store.put("a", b"x")
        assert caught.value.operation == "write"
        assert caught.value.__cause__ is not None
        assert fault.num_fired == store.num_retries + 1 > 2
        assert place.keys() == []
        fault.times = 0
        store.put("a", b"x")
        assert place.read("a") == b"x"


def test_i2_a_tenth_of_lookups_fail(place):
    """100 saves with 10 % of all lookups and listings failing are 100 commits."""
    fault = FailSome(0.1, random.Random(7).random, "size", "list")
    store = Store(place.url, place.options, retry=FAST, connect=FaultyConnect(fault))
    for number in range(100):
        store.put(f"checkpoints/{number}", b"x")
        assert store.size_bytes(f"checkpoints/{number}") == 1
    assert len(store.list_keys("checkpoints")) == 100
    assert fault.num_fired > 3
    assert len(place.keys()) == 100


class Held(Fault):
    """Calls wait until they are let go."""

    def __init__(self, *operations):
        super().__init__(*operations)
        self.let_go = threading.Event()

    def before(self, operation, key):
        self.fired()
        self.let_go.wait()


class CountParts(Fault):
    """Counts what reaches the store."""

    def after(self, operation, key):
        self.fired()


class TestI3ExpiredCredentials:
    @pytest.mark.parametrize("after_calls", [1, 2, 3, 4, 5])
    def test_an_upload_goes_on_with_new_ones(self, s3_place, make_source, after_calls):
        """Expired at any call of an upload: the client is made anew, sent parts are not sent again."""
        fault, parts = ExpireCredentials(after_calls, renewals=9), CountParts("part")
        connect = FaultyConnect(S3_PARTS, fault, parts)
        store = Store(s3_place.url, s3_place.options, retry=FAST, connect=connect)
        source, data = make_source(3 * PART)
        send(store, source, len(data), chunk_bytes=PART)
        store.put("manifest.json", b"{}")
        assert fault.num_fired >= 1
        assert store.num_refreshes == fault.num_fired
        assert parts.num_fired == 3
        assert s3_place.read("shard") == data
        assert s3_place.open_uploads() == []

    def test_without_new_ones_it_fails_softly(self, s3_place, make_source):
        """A permission error, nothing visible, and what was there stays."""
        s3_place.write("previous", b"x")
        fault = ExpireCredentials(2, renewals=0)
        store = Store(s3_place.url, s3_place.options, retry=FAST, connect=FaultyConnect(S3_PARTS, fault))
        source, data = make_source(3 * PART)
        with pytest.raises(StoragePermissionError, match="ExpiredToken"):
            send(store, source, len(data), chunk_bytes=PART)
        assert fault.num_fired > 1
        assert s3_place.keys() == ["previous"]

    def test_a_refresh_reads_the_environment_again(self, s3_place, monkeypatch):
        """Credentials that were not passed are taken from where they are now."""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stale")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stale")
        store = Store(s3_place.url, {"endpoint_url": s3_place.options["endpoint_url"]}, retry=FAST)
        with pytest.raises(StoragePermissionError):
            store.put("a", b"x")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_place.options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_place.options["secret"])
        store.backend.refresh()
        store.put("a", b"x")
        assert s3_place.read("a") == b"x"

    def test_secrets_are_never_shown(self, s3_place, caplog):
        """Not in errors, their facts, tracebacks, logs or the store's own text."""
        caplog.set_level("DEBUG", logger="raycheck")
        secrets = ("topsecretvalue", s3_place.options["key"])
        store = Store(s3_place.url, {**s3_place.options, "secret": "topsecretvalue"}, retry=FAST)
        with pytest.raises(StoragePermissionError) as caught:
            store.put("a", b"x")
        shown = "".join(traceback.format_exception(caught.value))
        for text in (shown, repr(caught.value.facts), repr(store), caplog.text):
            assert not any(secret in text for secret in secrets)


class TestI4AbandonedUploads:
    def test_cancelling_leaves_none(self, s3_place, make_source):
        """No part stays behind."""
        cancelled = threading.Event()
        store = Store(s3_place.url, s3_place.options, connect=FaultyConnect(S3_PARTS))
        source, data = make_source(5 * PART)
        with pytest.raises(StorageError, match="cancelled"):
            send(store, source, len(data), cancelled, chunk_bytes=PART, on_progress=lambda _: cancelled.set())
        assert s3_place.open_uploads() == []
        assert s3_place.keys() == []

    @pytest.mark.parametrize(("operation", "nth"), [("part", 3), ("complete", 1)])
    def test_a_failure_leaves_none(self, s3_place, make_source, operation, nth):
        """A part, or the end of an upload, fails for good."""
        fault = FailNth(nth, operation, times=100, error=lambda: s3_error("AccessDenied", 403))
        store = Store(s3_place.url, s3_place.options, connect=FaultyConnect(S3_PARTS, fault))
        source, data = make_source(5 * PART)
        with pytest.raises(StoragePermissionError):
            send(store, source, len(data), chunk_bytes=PART)
        assert fault.num_fired >= 1
        assert s3_place.open_uploads() == []
        assert s3_place.keys() == []

    def test_a_killed_writer_is_swept(self, s3_place, make_source):
        """What a killed process left is aborted after the grace time, and only that of this root."""
        store = Store(s3_place.url, s3_place.options)
        neighbour = Store(s3_place.url + "0", s3_place.options)
        neighbour.backend.begin_upload("shard", 10 * PART)
        source, data = make_source(2 * PART)
        pid = os.fork()
        if pid == 0:
            try:
                slow = FaultyConnect(S3_PARTS, Slow(60, "complete"))
                child = Store(s3_place.url, s3_place.options, connect=slow)
                send(child, source, len(data), chunk_bytes=PART)
            finally:
                os._exit(1)
        try:
            wait_for(lambda: len(s3_place.open_uploads()) == 2)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert store.sweep_uploads(3600) == []
        assert store.sweep_uploads(0) == ["shard"]
        assert [upload["Key"] for upload in s3_place.open_uploads()] == [
            s3_place.url.split("/")[-1] + "0/shard"
        ]


def test_i5_many_parts_fit_the_limits(local_place, make_source):
    """A store of at most 100 parts of at least 1 KiB takes 1 MiB: the part size follows the object's."""
    limits = CutParts(PartLimits(min_part_bytes=1024, max_parts=100, default_part_bytes=1024))
    parts = CountParts("part")
    store = Store(local_place.url, connect=FaultyConnect(limits, parts))
    source, data = make_source(MIB)
    send(store, source, MIB, chunk_bytes=1000)
    assert local_place.read("shard") == data
    assert 90 < parts.num_fired <= 100


@pytest.mark.parametrize("num_ranks", [4, 2])
def test_i6_each_rank_reads_its_share(place, never, num_ranks):
    """Ranks that each want 1/n of a shard fetch 1/n of its bytes."""
    chunk_bytes, size_bytes = 1000, 16_000
    data = os.urandom(size_bytes)
    place.write("shard", data)
    sums, share = sums_of(data, chunk_bytes), size_bytes // num_ranks
    for rank in range(num_ranks):
        fetched, destination = [], os.memfd_create("test")
        download(
            Store(place.url, place.options),
            "shard",
            [Read(rank * share, share, 0)],
            destination,
            sums=sums,
            parallel=2,
            cancelled=never,
            on_progress=fetched.append,
        )
        assert os.pread(destination, share, 0) == data[rank * share : (rank + 1) * share]
        assert sum(fetched) == share
        os.close(destination)


@pytest.mark.parametrize("capacity_bytes", [0, 1500])
def test_n1_a_full_disk_is_a_soft_failure(local_place, make_source, capacity_bytes):
    """One error with needed and free bytes, temporary data gone; with space again the next save works."""
    disk = FullDisk(capacity_bytes)
    store = Store(local_place.url, connect=lambda place, _: LocalBackend(place, pwrite=disk))
    store.backend.limits = SMALL_PARTS.limits
    source, data = make_source(5000)
    with pytest.raises(StorageError, match="5000 bytes") as caught:
        send(store, source, len(data))
    assert disk.num_fired >= 1
    assert caught.value.needed_bytes == 5000
    assert caught.value.free_bytes > 0
    assert store.num_retries == 0
    assert local_place.keys() == []
    disk.capacity_bytes = 5000
    send(store, source, len(data))
    assert local_place.read("shard") == data


def test_o1_a_url_is_never_a_local_folder(tmp_path, monkeypatch):
    """A URL that went through a path class is refused; no folder called 's3:' appears."""
    monkeypatch.chdir(tmp_path)
    for url in (Path("s3://bucket/x"), "s3:/bucket/x", Path("memory://x")):
        with pytest.raises(ConfigError, match="path class"):
            Store(url)
    for url in ("runs", Path("runs"), f"file://{tmp_path}/runs"):
        Store(url).put("a", str(url).encode())
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_o2_all_spellings_of_a_root_are_one(s3_url):
    """Slashes too many or too few change nothing; the bucket itself is a root too."""
    bucket = f"test-{uuid.uuid4().hex}"
    s3_url.client.create_bucket(Bucket=bucket)
    spellings = ["", "/p", "/p/", "//p", "/p//"]
    for spelling in spellings[1:]:
        Store(f"s3://{bucket}{spelling}", s3_url.options).put("a/b", spelling.encode())
        for other in spellings[1:]:
            assert Store(f"s3://{bucket}{other}", s3_url.options).get("a/b") == spelling.encode()
    for root in (f"s3://{bucket}", f"s3://{bucket}/"):
        Store(root, s3_url.options).put("top", b"x")
        assert Store(root, s3_url.options).list_children() == ["p", "top"]
    found = s3_url.client.list_objects_v2(Bucket=bucket)["Contents"]
    assert [entry["Key"] for entry in found] == ["p/a/b", "top"]


@pytest.mark.parametrize("prefix", ["run name (2)", "a+b", "100%", "a#1", "a=b", "run[1]", "run*", "läuft ✓"])
def test_o3_awkward_prefixes_round_trip(place, prefix):
    """They work as they are, and a neighbour that a wildcard would match is left alone."""
    place.write("run1/a", b"neighbour")
    place.write("runX/a", b"neighbour")
    store = Store(f"{place.url}/{prefix}", place.options)
    store.put("a/b", b"x")
    assert place.read(f"{prefix}/a/b") == b"x"
    assert [info.key for info in store.list_keys()] == ["a/b"]
    assert store.list_children() == ["a"]
    store.delete(["a/b"])
    assert place.keys() == ["run1/a", "runX/a"]


def test_o3_what_cannot_work_is_refused_at_start():
    """A '?' and percent codes in URLs; a plain path may hold both."""
    for prefix in ("what?", "a%20b"):
        with pytest.raises(ConfigError):
            Store(f"s3://bucket/{prefix}")
        assert Store(f"/tmp/{prefix}").url == f"/tmp/{prefix}"


def test_o4_placeholders_are_no_objects(place, store):
    """Zero-byte folders that people or consoles make confuse no listing and no delete."""
    place.add_placeholder("run")
    place.add_placeholder("run/step_10")
    assert store.list_keys() == []
    assert store.list_children() == []
    assert store.list_children("run") == []
    store.put("run/step_10/manifest.json", b"x")
    place.add_placeholder("run/step_10/empty")
    assert [info.key for info in store.list_keys()] == ["run/step_10/manifest.json"]
    assert store.list_children("run") == ["step_10"]
    assert store.list_children("run/step_10") == ["manifest.json"]
    with pytest.raises(ObjectNotFoundError):
        store.size_bytes("run/step_10")
    store.delete(["run/step_10/manifest.json"])
    place.add_placeholder("run/step_10")
    assert store.list_keys() == []
    assert store.list_children("run") == []


def test_o5_the_store_needs_fsspec_alone():
    """No pyarrow under the objects: they work where it has no S3 support."""
    folder = Path(raycheck.store.__file__).parent
    for path in folder.glob("*.py"):
        if path.name in ("run.py", "tables.py"):  # what is stored as Parquet
            continue
        imported = [
            name.name if isinstance(node, ast.Import) else node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        ]
        assert not any(name.startswith("pyarrow") for name in imported), path


class TestProbe:
    """A run that cannot store anything ends before its first step."""

    def probe(self, url, options=None, **arguments):
        policy = RetryPolicy(budget_s=0.3, first_delay_s=0.05)
        Store(url, options, retry=policy, **arguments).probe()

    def test_a_missing_bucket(self, s3_place):
        """Named, and not made."""
        with pytest.raises(ConfigError, match=r"s3://no-such-bucket/p.*NoSuchBucket"):
            self.probe("s3://no-such-bucket/p", s3_place.options)

    @pytest.mark.parametrize("wrong", ["key", "secret"])
    def test_wrong_credentials(self, s3_place, wrong):
        """Told apart from a missing bucket; not shown."""
        with pytest.raises(StoragePermissionError, match=s3_place.url) as caught:
            self.probe(s3_place.url, {**s3_place.options, wrong: "topsecretvalue"})
        assert "topsecretvalue" not in str(caught.value)

    def test_an_endpoint_where_nobody_listens(self):
        """The address is in the message."""
        options = {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:9"}
        with pytest.raises(StorageError, match=r"127\.0\.0\.1:9"):
            self.probe("s3://bucket/p", options)

    def test_an_endpoint_that_never_answers(self):
        """The client's timeout ends it."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            options = {
                "key": "a",
                "secret": "b",
                "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "config_kwargs": {"read_timeout": 0.2},
            }
            with pytest.raises(StorageError, match=r"(?i)timeout|timed out"):
                self.probe("s3://bucket/p", options)

    def test_a_path_below_a_file(self, tmp_path):
        """A folder that cannot be made."""
        (tmp_path / "file").write_text("x")
        with pytest.raises(StorageError, match="file/runs"):
            self.probe(tmp_path / "file" / "runs")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_an_unwritable_path(self, tmp_path):
        """Permission refused, with the path."""
        tmp_path.chmod(0o500)
        with pytest.raises(StoragePermissionError, match="runs"):
            self.probe(tmp_path / "runs")

    def test_a_read_only_store(self, place):
        """The write is refused."""
        fault = FailNth(1, "write", times=100, error=lambda: s3_error("AccessDenied", 403))
        with pytest.raises(StoragePermissionError, match="write"):
            self.probe(place.url, place.options, connect=FaultyConnect(fault))
        assert fault.num_fired == 1
        assert place.keys() == []

    def test_stale_listings(self, place):
        """A store that does not list what was just written is refused, and left clean."""
        fault = StaleListing()
        connect = FaultyConnect(fault)
        Store(place.url, place.options, connect=connect).list_keys("raycheck-probe")
        with pytest.raises(StorageError, match="consistent"):
            self.probe(place.url, place.options, connect=connect)
        assert fault.num_fired >= 1
        assert place.keys() == []

    def test_a_lost_reply(self, place):
        """A write whose reply was lost is no reason to refuse."""
        fault = LoseReply(1, "write")
        self.probe(place.url, place.options, connect=FaultyConnect(fault))
        assert fault.num_fired == 1
        assert place.keys() == []
