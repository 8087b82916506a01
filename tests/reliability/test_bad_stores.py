"""Whole checkpoints, by real processes, on stores that misbehave."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import threading

import pytest

from raycheck.errors import StorageError, StoragePermissionError
from tests.reliability.chaos import INTERVAL_STEPS, ChaosCluster, limit_file_size
from tests.reliability.proxy import (
    CutRequest,
    Delay,
    Expire,
    LoseReply,
    Refuse,
    StaleListing,
    wait_for_firing,
)
from tests.reliability.training import WIDE, Expected
from tests.runtime.harness import wait_until

MANIFEST = "manifest.json$"
SHARD = "safetensors$"


@pytest.fixture(scope="module")
def expected():
    return {width: Expected(width, INTERVAL_STEPS) for width in (64, WIDE)}


@pytest.fixture
def run(tmp_path, expected):
    """Make a run that trains, and judge it at the end."""
    with contextlib.ExitStack() as stack:

        def make(url, options=None, *, begins=True, **fields):
            folder = tmp_path / "cluster"
            folder.mkdir()
            cluster = ChaosCluster(url, options, folder, **fields)
            stack.callback(cluster.close)
            if begins:
                cluster.begin()
                assert cluster.restored() is not None
                cluster.wait_for_ack()
            return cluster

        yield make


@pytest.fixture
def s3_run(run, url, server, proxy):
    """The same on S3, behind the proxy."""

    def make(**fields):
        options = {**server.options, "endpoint_url": proxy.endpoint}
        return run(url, options, proxy=proxy, direct_options=server.options, **fields)

    return make


def assert_well(cluster, expected):
    """It commits again, all that has a manifest is whole, and nothing acknowledged is lost."""
    cluster.wait_for_ack()
    acknowledged = cluster.newest_ack()
    verdict = cluster.judge(expected[cluster.width])
    assert verdict.problems == []
    assert verdict.newest >= acknowledged


def restart(cluster, expected):
    """Start another group; it restores what was acknowledged, bit for bit."""
    cluster.end_group()
    acknowledged = cluster.newest_ack()
    cluster.begin()
    step, state = cluster.restored()
    assert step >= acknowledged
    assert state == expected[cluster.width].at(step)


def await_failure(cluster, text):
    """Wait for an attempt that came to nothing, and return why."""
    return wait_until(
        lambda: next((detail for detail in cluster.failures if text in detail), None), f"a failure: {text}"
    )


@pytest.mark.parametrize("retry_s", [0.0, 60.0])
def test_a_manifest_whose_reply_is_lost_is_a_commit(s3_run, proxy, expected, retry_s):
    """Where it is not tried again it is read back: acknowledged, with no attempt given up."""
    cluster = s3_run(retry_s=retry_s)
    trouble = proxy.plan(LoseReply("put", key=MANIFEST))
    assert wait_for_firing(trouble)
    num_failures = len(cluster.failures)
    assert_well(cluster, expected)
    assert [detail for detail in cluster.failures[num_failures:] if "cannot" in detail] == []
    restart(cluster, expected)


def test_a_manifest_that_never_arrives_is_no_commit(s3_run, proxy, expected):
    """The connection is cut within it, time after time: no acknowledgement, and the next one counts."""
    cluster = s3_run(retry_s=0.3)
    trouble = proxy.plan(CutRequest("put", key=MANIFEST, times=None))
    await_failure(cluster, "manifest.json")
    acknowledged = cluster.newest_ack()
    assert cluster.judge(expected[cluster.width]).newest == acknowledged
    proxy.lift(trouble)
    assert trouble.num_fired >= 1
    assert_well(cluster, expected)


@pytest.mark.parametrize(
    "planned",
    [
        Delay(0.3, "begin", "part", "complete", times=6),
        CutRequest("part", times=3),
        LoseReply("complete", key=SHARD),
        LoseReply("begin", key=SHARD),
        Refuse(503, "SlowDown", "part", "begin", times=6),
        Refuse(403, "ExpiredToken", "part", times=2),
    ],
    ids=lambda each: f"{type(each).__name__}-{each.operations[0]}",
)
def test_a_shard_in_parts_arrives_whole(planned, s3_run, proxy, expected):
    """No attempt fails, and what is committed is what the ranks had."""
    cluster = s3_run(width=WIDE)
    trouble = proxy.plan(planned)
    assert wait_for_firing(trouble)
    num_failures = len(cluster.failures)
    assert_well(cluster, expected)
    # A plan that was seen too late has nothing to do with storage.
    assert [detail for detail in cluster.failures[num_failures:] if "cannot" in detail] == []


def test_credentials_that_expire_in_an_upload_fail_softly_and_new_ones_do(
    run, url, server, proxy, expected, tmp_path, monkeypatch
):
    """Training goes on without checkpoints until the file has new ones; the agents are not started again."""
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))

    def write(options):
        path.write_text(
            f"[default]\naws_access_key_id = {options['key']}\naws_secret_access_key = {options['secret']}\n"
        )

    write(server.options)
    cluster = run(
        url,
        {"endpoint_url": proxy.endpoint},
        proxy=proxy,
        direct_options=server.options,
        width=WIDE,
        environment={"AWS_SHARED_CREDENTIALS_FILE": str(path)},
    )
    pids = [agent.pid for agent in cluster.agents.values()]
    trouble = proxy.plan(Expire("part", skip=1))
    assert "ExpiredToken" in await_failure(cluster, "permission refused")
    acknowledged = cluster.newest_ack()
    assert cluster.judge(expected[cluster.width]).newest == acknowledged
    write(server.other_options)
    assert_well(cluster, expected)
    assert trouble.num_fired > 1
    assert [agent.pid for agent in cluster.agents.values()] == pids


class TestReadOnlyBucket:
    def test_it_is_refused_at_the_start(self, run, url, server):
        """Before the first step, with what is missing."""
        cluster = run(url, server.reader_options, begins=False)
        with pytest.raises(StoragePermissionError, match=r"cannot write .*permission refused.*AccessDenied"):
            cluster.coordinator.check()

    def test_one_that_becomes_so_lets_training_go_on(self, s3_run, proxy, expected, caplog):
        """Each attempt fails with the reason; when writes are allowed again, the next one counts."""
        cluster = s3_run()
        with caplog.at_level(logging.WARNING, "raycheck"):
            trouble = proxy.plan(Refuse(403, "AccessDenied", "put", "begin", "part", times=None))
            await_failure(cluster, "AccessDenied")
            acknowledged = cluster.newest_ack()
            wait_until(lambda: len(cluster.failures) >= 3, "further attempts")
        assert cluster.newest_ack() == acknowledged
        assert cluster.judge(expected[cluster.width]).newest == acknowledged
        assert all(worker.is_alive() for worker in cluster.generations[-1].workers)
        assert "no checkpoint at step" in caplog.text
        assert "permission refused" in caplog.text
        proxy.lift(trouble)
        assert_well(cluster, expected)

    def test_training_stops_where_the_user_tolerates_no_more(self, s3_run, proxy, expected):
        """``on_failure=1``: the second failure in a row ends it, and the last checkpoint stays."""
        cluster = s3_run(on_failure=1)
        proxy.plan(Refuse(403, "AccessDenied", "put", "begin", "part", times=None))
        outcomes = cluster.generations[-1].outcomes()
        assert all("SaveError: 2 saves in a row failed" in each["error"] for each in outcomes), outcomes
        acknowledged = cluster.newest_ack()
        verdict = cluster.judge(expected[cluster.width])
        assert verdict.problems == []
        assert verdict.newest == acknowledged


def test_a_store_with_stale_listings_is_refused_at_the_start(s3_run, proxy):
    """With what raycheck needs, and before anything is claimed."""
    cluster = s3_run(begins=False)
    trouble = proxy.plan(StaleListing())
    with pytest.raises(StorageError, match="raycheck needs a store whose listings are consistent"):
        cluster.coordinator.check()
    assert trouble.num_fired >= 1
    proxy.lift(trouble)
    cluster.coordinator.check()
    assert cluster.run_store.claims() == []


def test_a_record_that_may_not_be_written_ends_the_start_and_not_the_run(s3_run, proxy, expected):
    """All ranks are told why, nothing is loaded, and the next start restores."""
    cluster = s3_run()
    cluster.end_group()
    trouble = proxy.plan(Refuse(403, "AccessDenied", "put", key=r"generations/[^.]*\.json$", times=1))
    cluster.begin()
    assert cluster.restored() is None
    outcomes = cluster.generations[-1].outcomes()
    assert all("record cannot be written" in each["error"] for each in outcomes), outcomes
    assert trouble.num_fired == 1
    restart(cluster, expected)


def test_a_restart_waits_for_a_store_that_does_not_answer(s3_run, proxy, expected):
    """For longer than any other call is tried; then it goes on from what was acknowledged."""
    cluster = s3_run(retry_s=0.3)
    cluster.end_group()
    trouble = proxy.plan(Refuse(503, "SlowDown", "list", "get", "put", "head", times=None))
    beginning = threading.Thread(target=cluster.begin)
    beginning.start()
    wait_until(lambda: trouble.num_fired >= 6, "calls that are tried again")
    assert beginning.is_alive()
    proxy.lift(trouble)
    beginning.join(120)
    step, state = cluster.restored()
    assert step >= cluster.newest_ack()
    assert state == expected[cluster.width].at(step)
    assert cluster.run_store.store.num_retries == 0, "others are not that patient"


class TestFullDisk:
    def test_a_full_file_system_lets_training_go_on(self, run, small_disk, expected):
        """Softly, with needed and free bytes, leaving nothing behind; with space again the next one counts."""
        cluster = run(str(small_disk / "run"))
        ballast = small_disk / "ballast"
        fill(ballast)
        detail = await_failure(cluster, "no space left")
        assert re.search(r"it needs \d+ bytes, \d+ are free", detail), detail
        acknowledged = cluster.newest_ack()
        assert cluster.judge(expected[cluster.width]).newest == acknowledged
        assert all(worker.is_alive() for worker in cluster.generations[-1].workers)
        ballast.unlink()
        assert_well(cluster, expected)
        assert list((small_disk / "run" / ".raycheck-partial").iterdir()) == []
        restart(cluster, expected)

    def test_a_quota_of_the_agents_lets_training_go_on(self, run, tmp_path, expected):
        """The same where a limit of the process stops the write half way (RLIMIT_FSIZE)."""
        cluster = run(str(tmp_path / "run"))
        for agent in cluster.agents.values():
            limit_file_size(agent.pid, 4096)
        assert "the next save tries again" in await_failure(cluster, "cannot write")
        acknowledged = cluster.newest_ack()
        assert cluster.judge(expected[cluster.width]).newest == acknowledged
        for agent in cluster.agents.values():
            limit_file_size(agent.pid, -1)
        assert_well(cluster, expected)
        restart(cluster, expected)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "raycheck-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system; the test with a quota covers the same code")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path):
    """Take all space that is left, and what rotation frees, until the disk stays full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)

    def write():
        with contextlib.suppress(OSError):
            while not stopped.is_set():
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"x" * 4096)
                stopped.wait(0.001)
        os.close(descriptor)

    stopped = threading.Event()
    thread = threading.Thread(target=write)
    thread.start()
    wait_until(lambda: os.statvfs(path.parent).f_bavail == 0, "a full disk")
    stopped.set()
    thread.join()
