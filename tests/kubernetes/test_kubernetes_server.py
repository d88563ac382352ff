"""A judge that a run serves itself, in a pod that pods of another node ask."""

from pathlib import Path

import pytest

from flows.pipeline.loading import load_config
from tests.fake_vllm import served_judge
from tests.flows.loop import ROOT
from tests.flows.test_servers import QUICKSTART, logs, run, score_step, scores
from tests.kubernetes.cluster import CPUS, Namespace
from tests.kubernetes.pods import execution

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]


def test_pods_ask_the_server_on_another_node_and_it_ends_with_the_run(
    cluster: Namespace, tmp_path: Path
) -> None:
    cpus = [f"resources.{stage}.cpus={CPUS}" for stage in ("serve", "score")]
    config = load_config(QUICKSTART, [*served_judge(tmp_path), *cpus])
    nodes = {"serve": "node1", "score": "node2"}
    stages = {name: {"node_selector": {"kubernetes.io/hostname": nodes[name]}} for name in nodes}
    stages["serve"]["environment"] = {"PYTHONPATH": f"{tmp_path / 'fake'}:{ROOT}"}
    # Not the folder that holds all: it is the tests' user's alone.
    folders = [tmp_path / each for each in ("store", "model", "fake", "responses")]
    folders[-1].mkdir()
    there = execution(cluster.settings(*folders, stages=stages))
    with run(config.model_copy(update={"execution": there})) as executor:
        for shard in range(2):
            assert scores(executor, score_step(config, folders[-1], shard)) == [7.0] * 4
        [server] = cluster.pods()
        assert server["spec"]["nodeName"] == "node1"
    assert cluster.pods() == []
    assert len(logs(config)) == 1
