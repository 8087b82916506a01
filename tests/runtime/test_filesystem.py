"""Places that are named by pyarrow's file systems."""

import types

import fsspec
import pyarrow.fs
import pytest

import raycheck
from raycheck.errors import ConfigError
from raycheck.runtime.filesystem import place_of
from raycheck.store.objects import Store


def test_local_file_systems(tmp_path):
    """pyarrow's, a part of it, and fsspec's in pyarrow's wrapping."""
    local = pyarrow.fs.LocalFileSystem()
    assert place_of("/a/b", local) == ("/a/b", None)
    assert place_of("b", pyarrow.fs.SubTreeFileSystem("/a", local)) == ("/a/b", None)
    wrapped = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("file")))
    url, options = place_of(str(tmp_path), wrapped)
    Store(url, options).put("x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


def test_s3_options_are_taken_over():
    """Address, region and lasting keys; temporary keys are the agents' own business."""
    s3 = pyarrow.fs.S3FileSystem(
        access_key="k", secret_key="s", endpoint_override="127.0.0.1:99", scheme="http", region="eu-west-3"
    )
    assert place_of("bucket/runs", s3) == (
        "s3://bucket/runs",
        {
            "key": "k",
            "secret": "s",
            "endpoint_url": "http://127.0.0.1:99",
            "client_kwargs": {"region_name": "eu-west-3"},
        },
    )
    brief = pyarrow.fs.S3FileSystem(access_key="k", secret_key="s", session_token="t", region="x")
    assert place_of("bucket", brief)[1] == {"client_kwargs": {"region_name": "x"}}
    assert place_of("bucket", pyarrow.fs.S3FileSystem(anonymous=True, region="x"))[1]["anon"] is True


def test_an_s3_place_is_the_same_place(s3_server):
    """What is written by way of pyarrow is found by way of the derived URL."""
    s3 = pyarrow.fs.S3FileSystem(
        access_key=s3_server.options["key"],
        secret_key=s3_server.options["secret"],
        endpoint_override=s3_server.endpoint,
        region="us-east-1",
    )
    with s3.open_output_stream(f"{s3_server.bucket}/arrow/object") as stream:
        stream.write(b"same place")
    url, options = place_of(f"{s3_server.bucket}/arrow", s3)
    assert Store(url, options).get("object") == b"same place"


def test_other_file_systems_are_refused():
    """The message says what to give instead."""

    with pytest.raises(ConfigError, match="storage_options"):
        place_of("x", object())


def test_the_callback_takes_over_the_file_system_of_the_run():
    """Options of the settings come first."""
    s3 = pyarrow.fs.S3FileSystem(access_key="k", secret_key="s", region="x")
    run = types.SimpleNamespace(storage_path="bucket/runs", name="mine", storage_filesystem=s3)
    context = types.SimpleNamespace(run_config=run)
    url, options = raycheck.AutoCheckpoint()._choose_store(context)
    assert url == "s3://bucket/runs/mine/raycheck"
    assert options["key"] == "k"
    own = raycheck.AutoCheckpoint(storage_options={"anon": True})._choose_store(context)
    assert own == ("s3://bucket/runs/mine/raycheck", {"anon": True})
    elsewhere = raycheck.AutoCheckpoint(storage_path="/data")._choose_store(context)
    assert elsewhere == ("/data/mine/raycheck", None)
