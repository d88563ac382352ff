"""A `geb up` for the flow tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flows.standing import Up, geb_up


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A `geb up` at work, with a server, a worker and a store of its own."""
    with geb_up(tmp_path_factory.mktemp("up")) as (_, up):
        yield up
