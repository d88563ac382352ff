"""Training on two nodes: two programs of this machine that meet at an address."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.contract.errors import EXIT_USER
from stages.store.base import Store
from tests.stages.train.train_helpers import Trained, make_pairs, request_for, train

pytestmark = pytest.mark.slow

SETTINGS = {"micro_batch_tokens": 16, "deepspeed": {"zero_stage": 2}}
ADDRESS = "127.0.0.1"
ONE_NODE_FAILS = """
import os

calls = 0

def objective(chosen, rejected):
    global calls
    calls += 1
    if calls > 3 and os.environ.get("RANK") == "1":
        raise RuntimeError("my bug on one node")
    return {"loss": 0.0 * chosen.logp}
"""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", 29, ties=(3, 7))


def start(module, argument):
    return subprocess.Popen(
        [sys.executable, "-m", module, str(argument)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=os.environ | {"GEB_NODE_ADDRESS": ADDRESS, "PYTHONPATH": str(Path.cwd())},
        text=True,
    )


def train_on_two_nodes(folder, policy, pairs, **options):
    """The request, and the process of each node, which has ended, with its output."""
    request = request_for(folder, policy, [pairs], nodes=2, **SETTINGS, **options)
    path = folder / "request.json"
    request.write(path)
    work = Store.in_folder(request.store).work_path(request.stage, request.key)
    with start("stages.train", path) as first, start("stages.training.node", work) as second:
        output, _ = first.communicate()
        if first.returncode:
            # It waits for the first node, should that not have come.
            second.terminate()
        joined, _ = second.communicate()
    return request, (first, output), (second, joined)


def test_a_mistake_that_only_the_second_node_makes_ends_both(tmp_path, policy, pairs):
    """Its end breaks the connections of the first node, whose exit code counts."""
    code = tmp_path / "objective.py"
    code.write_text(ONE_NODE_FAILS)
    _, (first, output), (second, joined) = train_on_two_nodes(
        tmp_path / "store", policy, pairs, objective="python", code=code
    )
    assert (first.returncode, second.returncode) == (EXIT_USER, EXIT_USER), output + joined
    assert "my bug on one node" in output.splitlines()[-1]


def test_two_nodes_of_two_processes_train_as_one_of_four(tmp_path, policy, pairs):
    one = train(tmp_path / "one", policy, [pairs], processes=4, **SETTINGS)
    request, (first, output), (second, joined) = train_on_two_nodes(
        tmp_path / "two", policy, pairs, processes=2
    )
    assert first.returncode == 0, output
    assert second.returncode == 0, joined
    assert f"joins 2 nodes at {ADDRESS}" in joined
    artifact = Store.in_folder(request.store).load(request.stage, request.key)
    two = Trained(artifact, [json.loads(line) for line in output.splitlines()])
    assert two.artifact.manifest.key == one.artifact.manifest.key
    assert two.losses == pytest.approx(one.losses, rel=1e-4, abs=1e-5)
