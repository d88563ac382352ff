"""Training on two nodes: two network namespaces of this machine, joined by a virtual cable."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stages.store.base import Store
from tests.programs import lacking, run_program
from tests.stages.train.train_helpers import Trained, make_pairs, request_for, train

pytestmark = pytest.mark.slow

SETTINGS = {"micro_batch_tokens": 16, "deepspeed": {"zero_stage": 2}}
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29517


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", 29, ties=(3, 7))


def ip(*arguments, check=True):
    """Runs iproute2; whether it succeeded."""
    done = run_program("ip", *arguments)
    assert not check or done.returncode == 0, done.stderr
    return done.returncode == 0


@pytest.fixture
def namespaces():
    """Two network namespaces that see each other and nothing else."""
    names = [f"geb-{os.getpid()}-{node}" for node in range(2)]
    if shutil.which("ip") is None or not ip("netns", "add", names[0], check=False):
        lacking("network namespaces need iproute2 and root")
    try:
        ip("netns", "add", names[1])
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable",
           "netns", names[1])  # fmt: skip
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


@contextlib.contextmanager
def started(namespace, module, argument):
    """A program in a network namespace."""
    with subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, "-m", module, str(argument)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # The host's name leads to no address of a namespace.
        env=os.environ
        | {
            "GEB_NODE_ADDRESS": f"{ADDRESSES[0]}:{PORT}",
            "GLOO_SOCKET_IFNAME": "cable",
            "PYTHONPATH": str(Path.cwd()),
        },
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_two_nodes_of_two_processes_train_as_one_of_four(tmp_path, namespaces, policy, pairs):
    one = train(tmp_path / "one", policy, [pairs], processes=4, **SETTINGS)
    request = request_for(tmp_path / "two", policy, [pairs], processes=2, nodes=2, **SETTINGS)
    path = tmp_path / "request.json"
    request.write(path)
    work = Store.open(request.store).work_path(request.stage, request.key)
    with (
        started(namespaces[1], "stages.training.node", work) as second,
        started(namespaces[0], "stages.train", path) as first,
    ):
        output, _ = first.communicate()
        joined, _ = second.communicate()
    assert first.returncode == 0, output
    assert second.returncode == 0, joined
    assert f"joins 2 nodes at {ADDRESSES[0]}" in joined
    artifact = Store.open(request.store).load(request.stage, request.key)
    assert artifact is not None
    two = Trained(artifact, [json.loads(line) for line in output.splitlines()])
    assert two.artifact.manifest.key == one.artifact.manifest.key
    assert two.losses == pytest.approx(one.losses, rel=1e-4, abs=1e-5)
