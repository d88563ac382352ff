"""Fixtures of several flow tests: a `geb up`, and a finished run to change."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.loop import write_config
from tests.flows.standing import Up, geb_up


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A `geb up` at work, with a server, a worker and a store of its own."""
    with geb_up(tmp_path_factory.mktemp("up")) as (_, up):
        yield up


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A finished run whose store the test may change; modification times are kept."""
    shutil.copytree(finished.parent, tmp_path / "run", copy_function=shutil.copy2)
    return write_config(tmp_path / "run")
