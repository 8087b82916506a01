"""URLs and paths, normalised or refused before anything is contacted."""

import os
from pathlib import Path, PurePosixPath

import pytest

from raycheck.errors import ConfigError
from raycheck.store.location import parse_location
from raycheck.store.objects import Store
from raycheck.store.s3 import make_client


@pytest.mark.parametrize(
    ("url", "scheme", "root"),
    [
        ("s3://bucket", "s3", "bucket"),
        ("s3://bucket/", "s3", "bucket"),
        ("S3://bucket/p", "s3", "bucket/p"),
        ("s3a://bucket/p/", "s3", "bucket/p"),
        ("s3://bucket//p", "s3", "bucket/p"),
        ("s3://bucket//p//q//", "s3", "bucket/p/q"),
        ("s3://bucket/run name (2)/a+b=c [1]*#é", "s3", "bucket/run name (2)/a+b=c [1]*#é"),
        ("s3://bucket/100%", "s3", "bucket/100%"),
        ("file:///tmp/a%20b", "file", "/tmp/a b"),
        ("file://localhost/tmp//a/", "file", "/tmp/a"),
        ("/tmp//a/../b/", "file", "/tmp/b"),
        ("/tmp/a%20b?c#d=[1]*+é (2)", "file", "/tmp/a%20b?c#d=[1]*+é (2)"),
        (Path("/tmp/a"), "file", "/tmp/a"),
        (PurePosixPath("/tmp/a"), "file", "/tmp/a"),
        ("memory://a//b/", "memory", "a/b"),
    ],
)
def test_urls_are_normalised(url, scheme, root):
    """One place has one root, and the root's own URL leads to the same place."""
    location = parse_location(url)
    assert (location.scheme, location.root) == (scheme, root)
    again = parse_location(location.url)
    assert (again.scheme, again.root) == (scheme, root)


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
    """A store does not move when the process changes its folder."""
    monkeypatch.chdir(tmp_path)
    store = Store("runs/one")
    assert store.url == str(tmp_path / "runs/one")
    assert Store(Path("runs") / "one").url == store.url
    assert Store("~/runs").url == os.path.expanduser("~/runs")


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("", "not a path or URL"),
        ("  ", "not a path or URL"),
        ("/tmp/a\x00b", "control character"),
        ("s3://bucket/a\nb", "control character"),
        ("/tmp/\udc80", "not valid text"),
        ("s4://bucket/p", r"unknown scheme; known are .*file.*s3"),
        ("s3://", "names no bucket"),
        ("s3:///bucket/p", "names no bucket"),
        ("s3://ab/p", "does not name a bucket"),
        ("s3://bucket/a%20b", "percent code"),
        ("s3://bucket/../other", "as a name"),
        ("s3://bucket/what?/run", "unknown query"),
        ("s3://bucket/p?versionId=1", "unknown query versionId"),
        ("file://host/p", "absolute path"),
        ("file://relative", "absolute path"),
        ("file:///a?b", "plain path"),
        ("s3:/bucket/p", "path class"),
        (Path("s3://bucket/p"), "path class"),
        ("memory://", "names no bucket or folder"),
    ],
)
def test_what_cannot_work_is_refused(url, fault):
    """One clear error, at construction."""
    with pytest.raises(ConfigError, match=fault) as caught:
        Store(url)
    assert caught.value.field == "storage_path"


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("endpoint_override=localhost:9000&scheme=http", {"endpoint_url": "http://localhost:9000"}),
        ("endpoint_override=minio.example", {"endpoint_url": "https://minio.example"}),
        ("endpoint_override=http%3A%2F%2Fa%3A1", {"endpoint_url": "http://a:1"}),
        ("region=eu-west-1", {"client_kwargs": {"region_name": "eu-west-1"}}),
        ("scheme=http", {"use_ssl": False}),
        ("scheme=https&allow_bucket_creation=true", {}),
        ("force_virtual_addressing=true", {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}),
    ],
)
def test_the_query_of_ray_and_pyarrow_is_understood(query, options):
    """One URL serves Ray's file system and ours."""
    location = parse_location(f"s3://bucket/p?{query}")
    assert location.options == options
    assert location.url == "s3://bucket/p"


def test_options_win_over_the_query():
    """What is given explicitly counts, and both are merged."""
    store = Store(
        "s3://bucket?endpoint_override=a:1&region=r1",
        {"endpoint_url": "http://b:2", "client_kwargs": {"verify": False}},
    )
    assert store.__reduce__()[1][1] == {
        "endpoint_url": "http://b:2",
        "client_kwargs": {"verify": False, "region_name": "r1"},
    }


@pytest.mark.parametrize(
    "url", ["s3://AKIA:topsecret@bucket/p", "s3://bucket/p?access_key=AKIA&secret_key=topsecret"]
)
def test_credentials_in_a_url_are_refused_and_not_shown(url):
    """Nothing secret is in the error, in the repr or in the attributes."""
    with pytest.raises(ConfigError) as caught:
        Store(url)
    assert "topsecret" not in f"{caught.value} {caught.value.facts}"


def test_repr_shows_no_options():
    """A store can be logged."""
    store = Store("s3://bucket/p", {"key": "AKIA", "secret": "topsecret"})
    assert repr(store) == "Store('s3://bucket/p')"
    assert "topsecret" not in repr(store.location)


def test_unknown_options_are_refused_without_values():
    """A wrong option is named, its value is not."""
    with pytest.raises(ConfigError, match="secrett") as caught:
        make_client({"secrett": "topsecret"})
    assert "topsecret" not in str(caught.value)


def test_the_options_of_s3fs_reach_the_client(monkeypatch):
    """Endpoint, region, timeouts, anonymous access: as s3fs reads them."""
    client, extra = make_client(
        {
            "endpoint_url": "http://127.0.0.1:1",
            "client_kwargs": {"region_name": "eu-west-1"},
            "config_kwargs": {"read_timeout": 3, "connector_args": {}, "s3": {"addressing_style": "path"}},
            "requester_pays": True,
            "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
            "anon": True,
        }
    )
    assert client.meta.endpoint_url == "http://127.0.0.1:1"
    assert client.meta.region_name == "eu-west-1"
    assert client.meta.config.read_timeout == 3
    assert client.meta.config.s3 == {"payload_signing_enabled": False, "addressing_style": "path"}
    assert extra == {"RequestPayer": "requester", "ServerSideEncryption": "AES256"}

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    client, _ = make_client({"key": "a", "secret": "b"})
    assert client.meta.endpoint_url == "http://127.0.0.1:2"
