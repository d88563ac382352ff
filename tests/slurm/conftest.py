"""A Slurm cluster, for one module at a time."""

import pytest

from tests.launchers.launcher import store as store
from tests.slurm.jobs import slurm_launcher


@pytest.fixture(scope="module")
def launcher():
    """Starts probes as jobs."""
    with slurm_launcher() as launcher:
        yield launcher
