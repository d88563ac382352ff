"""A Slurm cluster, for one module at a time."""

import pytest

from tests.launchers.launcher import shared_folder
from tests.launchers.launcher import store as store
from tests.slurm.jobs import slurm_launcher


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """Starts probes as jobs."""
    with slurm_launcher(shared_folder(tmp_path_factory)) as launcher:
        yield launcher
