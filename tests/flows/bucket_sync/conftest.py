"""Two hosts that share a bucket."""

from __future__ import annotations

import pytest

from stages.contract.remote.store import RemoteStore
from tests.flows.bucket_sync.hosts import Host, write


@pytest.fixture
def near(here: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("GEB_CACHE", "set by each host")
    return Host(here, write)


@pytest.fixture
def far(there: RemoteStore, near: Host) -> Host:
    return Host(there, write)
