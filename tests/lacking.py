"""Needs of some tests that a machine may lack."""

import os
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Skips the test on a developer's machine; fails it in CI, which installs everything."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have it: {what}")
    pytest.skip(what)
