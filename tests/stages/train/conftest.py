"""The policy that training tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, small enough to train in seconds."""
    return make_tiny_llama(tmp_path_factory.mktemp("policy"))
