"""The three stores that the contract is run against, each with a way around our code."""

from __future__ import annotations

import os
import random
import threading
import uuid

import fsspec
import pytest

from raycheck.store.objects import Store
from raycheck.store.retry import RetryPolicy

FAST = RetryPolicy(budget_s=5.0, first_delay_s=0.001, max_delay_s=0.01)
"""Retries as usual, without the waiting."""

MIB = 1 << 20


class MemoryPlace:
    """memory://, looked at with fsspec itself."""

    def __init__(self):
        self.url = f"memory://test-{uuid.uuid4().hex}/runs"
        self.options = {}
        self._fs = fsspec.filesystem("memory")
        self._root = self._fs._strip_protocol(self.url)

    def write(self, key, data):
        self._fs.pipe_file(f"{self._root}/{key}", data)

    def read(self, key):
        return self._fs.cat_file(f"{self._root}/{key}")

    def keys(self):
        return sorted(name.removeprefix(f"{self._root}/") for name in self._fs.find(self._root))

    def add_placeholder(self, key):
        self._fs.makedirs(f"{self._root}/{key}", exist_ok=True)


class LocalPlace:
    """A folder, looked at with the file system's own calls."""

    def __init__(self, folder):
        self.url = str(folder / "runs")
        self.options = {}
        self._folder = folder / "runs"

    def write(self, key, data):
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def read(self, key):
        return (self._folder / key).read_bytes()

    def keys(self):
        return sorted(
            os.path.relpath(os.path.join(folder, name), self._folder)
            for folder, _, names in os.walk(self._folder)
            for name in names
        )

    def add_placeholder(self, key):
        (self._folder / key).mkdir(parents=True, exist_ok=True)


class S3Place:
    """A bucket on a real server, looked at with a client of its own."""

    def __init__(self, place):
        self.url, self.options = place.url, place.options
        self._place = place

    def write(self, key, data):
        self._place.client.put_object(Bucket=self._place.bucket, Key=self._full(key), Body=data)

    def read(self, key):
        answer = self._place.client.get_object(Bucket=self._place.bucket, Key=self._full(key))
        return answer["Body"].read()

    def keys(self):
        pages = self._place.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._place.bucket, Prefix=self._full("")
        )
        found = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return sorted(name.removeprefix(self._full("")) for name in found)

    def add_placeholder(self, key):
        self.write(f"{key}/", b"")

    def open_uploads(self):
        answer = self._place.client.list_multipart_uploads(Bucket=self._place.bucket)
        return [each for each in answer.get("Uploads", []) if each["Key"].startswith(self._place.prefix)]

    def _full(self, key):
        return f"{self._place.prefix}/{key}"


@pytest.fixture(params=["memory", "local", "s3"])
def place(request, tmp_path):
    """Each kind of store in turn."""
    if request.param == "memory":
        return MemoryPlace()
    if request.param == "local":
        return LocalPlace(tmp_path)
    return S3Place(request.getfixturevalue("s3_url"))


@pytest.fixture
def s3_place(s3_url):
    return S3Place(s3_url)


@pytest.fixture
def local_place(tmp_path):
    return LocalPlace(tmp_path)


@pytest.fixture
def store(place):
    return Store(place.url, place.options, retry=FAST)


@pytest.fixture
def make_source():
    """Make a memory file with reproducible contents: (descriptor, bytes)."""
    descriptors = []

    def make(size_bytes, seed=0):
        data = random.Random(seed).randbytes(size_bytes)
        descriptor = os.memfd_create("test-source")
        descriptors.append(descriptor)
        os.write(descriptor, data)
        return descriptor, data

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture
def never():
    """An event that nobody sets."""
    return threading.Event()
