"""``raycheck doctor``: what it finds on a real machine and store, and what it makes of facts."""

import dataclasses
import json
import socket

import pytest

from raycheck.cli import facts as gathering
from raycheck.cli.health import MachineFacts, StorageFacts, judge
from raycheck.store.objects import Store
from raycheck.testing import FaultyConnect, StaleListing

GB = 10**9

HEALTHY = MachineFacts(
    host="node", system="Linux", kernel="6.1", python="3.11.7", memfd_error="", passing_error="",
    available_bytes=100 * GB, limit_left_bytes=None, locked_bytes=None, has_gpu=True,
    environment={"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "600"},
    versions={"ray": "2.60.0", "torch": "2.13.0"}, outdated={}, ray_error="", missing_hooks=(), is_tested_ray=True,
    storage=StorageFacts(
        url="s3://bucket/runs", probe_s=0.1, num_bytes=64_000_000, write_bytes_per_s=1e8, read_bytes_per_s=4e8
    ),
)  # fmt: skip


def statuses(facts, state_bytes=10 * GB):
    return {finding.topic: finding.status for finding in judge(facts, state_bytes=state_bytes)}


def findings_of(report):
    (machine,) = report["machines"]
    return {finding["topic"]: finding for finding in machine["findings"]}


def test_this_machine_and_a_folder(raycheck_json, raycheck, tmp_path):
    """The store is tried and left as it was; raycheck's own requirements are met here."""
    code, report = raycheck_json(
        "doctor", "--storage", tmp_path / "runs", "--probe-size", "3MB", "--bytes", "1MB"
    )
    found = findings_of(report)
    assert code == 0, report
    assert found["storage"]["status"] == found["ray"]["status"] == found["packages"]["status"] == "ok"
    assert "one object of 3 MB" in found["bandwidth"]["text"]
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] == []


def test_a_store_on_s3(raycheck_json, s3_url):
    """With its options; nothing is left there."""
    options = ["--storage-options", json.dumps(s3_url.options)]
    code, report = raycheck_json("doctor", "--storage", s3_url.url, "--probe-size", "6MB", *options)
    found = findings_of(report)
    assert found["storage"]["status"] == "ok", report
    assert found["storage"]["text"].startswith(f"{s3_url.url}: an object was written, listed at once")
    listed = s3_url.client.list_objects_v2(Bucket=s3_url.bucket, Prefix=s3_url.prefix)
    assert listed.get("KeyCount", 0) == 0
    wrong = ["--storage-options", json.dumps({**s3_url.options, "secret": "wrong"})]
    code, report = raycheck_json("doctor", "--storage", s3_url.url, *wrong)
    assert code == 1
    assert findings_of(report)["storage"]["status"] == "problem"
    assert "permission refused" in findings_of(report)["storage"]["text"]


def test_a_store_whose_listings_are_stale_is_a_problem(tmp_path, monkeypatch):
    """It is told from one that cannot be reached."""
    fault = StaleListing()

    def faulty_store(url, options, **settings):
        return Store(url, options, connect=FaultyConnect(fault), **settings)

    monkeypatch.setattr(gathering, "Store", faulty_store)
    storage = gathering.try_storage(str(tmp_path), {}, probe_bytes=10)
    assert fault.num_fired
    assert "a fresh listing does not show it" in storage.error
    assert statuses(dataclasses.replace(HEALTHY, storage=storage))["storage"] == "problem"


def test_a_healthy_machine_has_no_warnings():
    """All lines say ok."""
    assert set(statuses(HEALTHY).values()) == {"ok"}


@pytest.mark.parametrize(
    ("changes", "topic", "status", "text"),
    [
        ({"memfd_error": "not permitted"}, "snapshots", "problem", "not permitted"),
        ({"passing_error": "not permitted"}, "snapshots", "problem", "cannot be handed to another process"),
        ({"system": "Darwin"}, "snapshots", "problem", "train on Linux"),
        ({"available_bytes": 5 * GB}, "memory", "warning", "a state of 10 GB does not fit"),
        ({"limit_left_bytes": 8 * GB}, "memory", "warning", "8 GB are free below the memory limit"),
        ({"limit_left_bytes": 50 * GB}, "memory", "ok", "50 GB are free below the memory limit"),
        ({"available_bytes": None}, "memory", "warning", "cannot be told"),
        ({"locked_bytes": 65536}, "locked memory", "warning", "65.5 kB may be locked"),
        ({"locked_bytes": 65536, "has_gpu": False}, "locked memory", "ok", "there is no GPU"),
        ({"ray_error": "ImportError: gone"}, "ray", "problem", "has not the hooks"),
        ({"missing_hooks": ("before_x",)}, "ray", "problem", "does not call before_x"),
        ({"is_tested_ray": False}, "ray", "warning", "has not been tested"),
        ({"outdated": {"torch": ">=2.6 (missing)"}}, "packages", "problem", "torch >=2.6 (missing)"),
        ({"environment": {}}, "job stop", "warning", "RAY_JOB_STOP_SIGNAL=SIGINT"),
        ({"environment": {"RAY_TRAIN_V2_ENABLED": "0"}}, "ray", "problem", "unset it"),
        (
            {"environment": {"RAY_JOB_STOP_SIGNAL": "SIGINT"}},
            "job stop", "warning", "kills after 3 s, 10 GB of state take 100 s to upload",
        ),
        ({"storage": StorageFacts(url="s3://x", error="no bucket")}, "storage", "problem", "no bucket"),
    ],
)  # fmt: skip
def test_what_facts_mean(changes, topic, status, text):
    """Each with what to do."""
    found = judge(dataclasses.replace(HEALTHY, **changes), state_bytes=10 * GB)
    finding = next(finding for finding in found if finding.topic == topic)
    assert finding.status == status
    assert text in f"{finding.text}. {finding.advice}"
    assert (finding.advice != "") == (status != "ok")


def test_lines_fit_the_terminal_and_say_what_to_do(raycheck, monkeypatch):
    """A problem ends with exit code 1; nothing is longer than the terminal is wide."""
    monkeypatch.setenv("COLUMNS", "80")
    sick = dataclasses.replace(HEALTHY, memfd_error="Operation not permitted", storage=None)
    monkeypatch.setattr("raycheck.cli.doctor.gather", lambda *_, **__: sick)
    code, output = raycheck("doctor")
    assert code == 1
    assert all(len(line) <= 80 for line in output.splitlines())
    text = " ".join(output.split())
    assert "problem snapshots no memory file can be made: Operation not permitted. The sandbox" in text
    assert "not tried: give --storage" in text


def test_a_cluster_that_nobody_answers_for_is_told_at_once(raycheck):
    """Exit code 2; Ray by itself would try for many minutes."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        code, output = raycheck("doctor", "--address", address)
    assert code == 2
    assert f"--address {address}: no Ray cluster can be reached" in output


@pytest.mark.parametrize(
    "arguments", [["--bytes", "many"], ["--storage-options", "x"], ["--probe-size", "3 apples"]]
)
def test_wrong_options(raycheck, arguments):
    """Exit code 2."""
    assert raycheck("doctor", *arguments)[0] == 2
