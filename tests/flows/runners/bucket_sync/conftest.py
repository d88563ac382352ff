"""Two hosts that share a bucket."""

import pytest

from tests.flows.runners.bucket_sync.hosts import Host, write


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    """Each host sets its own in place of this one."""
    monkeypatch.setenv("GEB_CACHE", "set by each host")


@pytest.fixture
def near(here):
    return Host(here, write)


@pytest.fixture
def far(there):
    return Host(there, write)
