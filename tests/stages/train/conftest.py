"""The policy that training tests start from, and worker processes that start quickly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forking import forked_python
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, small enough to train in seconds."""
    return make_tiny_llama(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that the stage starts in this process are forks, see :mod:`tests.forking`."""
    monkeypatch.setattr(sys, "executable", forked_python())
