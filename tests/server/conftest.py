"""One server with a fake engine for the tests that leave no trace in it."""

import httpx
import pytest

from tests.server.fake import FakeClient
from tests.server.serving import serving


@pytest.fixture(scope="session")
def fake():
    return FakeClient()


@pytest.fixture(scope="session")
def address(fake):
    with serving(fake) as address:
        yield address


@pytest.fixture(scope="session")
def http(address):
    with httpx.Client(base_url=address.url, timeout=30) as client:
        yield client
