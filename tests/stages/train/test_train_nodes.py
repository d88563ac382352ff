"""Training on two nodes: two programs of this machine that meet at an address."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.store.base import Store
from tests.stages.train.train_helpers import Trained, make_pairs, request_for, train

pytestmark = pytest.mark.slow

SETTINGS = {"micro_batch_tokens": 16, "deepspeed": {"zero_stage": 2}}
ADDRESS = "127.0.0.1"


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


def test_two_nodes_of_two_processes_train_as_one_of_four(tmp_path, policy, pairs):
    one = train(tmp_path / "one", policy, [pairs], processes=4, **SETTINGS)
    request = request_for(tmp_path / "two", policy, [pairs], processes=2, nodes=2, **SETTINGS)
    path = tmp_path / "request.json"
    request.write(path)
    store = Store.in_folder(request.store)
    work = store.work_path(request.stage, request.key)
    with start("stages.train", path) as first, start("stages.training.node", work) as second:
        output, _ = first.communicate()
        if first.returncode:
            second.terminate()
        joined, _ = second.communicate()
    assert first.returncode == 0, output
    assert second.returncode == 0, joined
    assert f"joins 2 nodes at {ADDRESS}" in joined
    artifact = store.load(request.stage, request.key)
    two = Trained(artifact, [json.loads(line) for line in output.splitlines()])
    assert two.artifact.manifest.key == one.artifact.manifest.key
    assert two.losses == pytest.approx(one.losses, rel=1e-4, abs=1e-5)
