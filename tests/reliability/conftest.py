"""A server with several identities, and the proxy before it."""

from __future__ import annotations

import uuid

import pytest

from tests.reliability.chaos import RestartableServer
from tests.reliability.proxy import Proxy


@pytest.fixture(scope="package")
def server(tmp_path_factory):
    """A SeaweedFS that the tests of this folder share; those that kill one have their own."""
    server = RestartableServer(tmp_path_factory.mktemp("s3") / "data")
    yield server
    server.kill()


@pytest.fixture
def proxy(server):
    with Proxy(server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def url():
    """A fresh prefix."""
    return f"s3://raycheck-tests/{uuid.uuid4().hex[:12]}/runs"


@pytest.fixture(scope="module")
def module_proxy(server):
    with Proxy(server.endpoint) as proxy:
        yield proxy
