"""Tests of what only GPUs compute, against the CPU's numbers: collected for ``-m gpu`` alone."""

import pytest
import torch

from stages.contract.errors import EXIT_USER
from tests.stages.train.train_helpers import make_pairs
from tests.tiny_models import make_tiny_llama


def pytest_ignore_collect(collection_path, config):
    """Leaves the tests out where no marker expression names GPUs."""
    return None if "gpu" in config.getoption("markexpr") else True


@pytest.fixture(scope="session", autouse=True)
def _needs_gpu():
    if not torch.cuda.is_available():
        pytest.exit("no GPU that torch sees", returncode=EXIT_USER)


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """A Llama of random weights with grouped heads of a width that all kernels know."""
    folder = tmp_path_factory.mktemp("policy")
    return make_tiny_llama(folder / "model", hidden_size=256, initializer_range=0.1)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Preference pairs, two of them ties."""
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", ties=(3, 7))
