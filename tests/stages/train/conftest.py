"""The policy that training tests start from, and worker processes that start quickly."""

import sys

import pytest

from tests.forking import forked_python
from tests.stages.train.train_helpers import make_pairs, train
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A Llama of random weights, small enough to train in seconds."""
    return make_tiny_llama(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A second policy, of other weights."""
    return make_tiny_llama(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, policy, pairs):
    """The policy, trained on the pairs with the usual settings."""
    return train(tmp_path_factory.mktemp("store"), policy, [pairs])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Preference pairs, two of them ties."""
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", ties=(3, 7))


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers that the stage starts in this process are forks, see :mod:`tests.forking`."""
    monkeypatch.setattr(sys, "executable", forked_python())
