"""A judge that a run serves itself, as a job that jobs of another node ask."""

from pathlib import Path

import pytest

from flows.pipeline.loading import load_config
from flows.runners.slurm import client
from stages.store.base import Store
from tests.fake_vllm import served_judge
from tests.flows.test_servers import QUICKSTART, logs, run, score_step, scores
from tests.slurm.jobs import execution

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]


def test_jobs_ask_the_server_on_another_node_and_it_ends_with_the_run(
    store: Store, tmp_path: Path
) -> None:
    config = load_config(QUICKSTART, served_judge(tmp_path))
    nodes = {"serve": "node1", "score": "node2"}
    stages = {name: {"sbatch_options": [f"--nodelist={node}"]} for name, node in nodes.items()}
    there = execution(stages=stages).model_copy(
        update={"interpreters": config.execution.interpreters}
    )
    with run(config.model_copy(update={"execution": there})) as executor:
        for shard in range(2):
            assert scores(executor, score_step(config, tmp_path, shard)) == [7.0] * 4
        assert any("-serve-model-" in each.work for each in client.own_jobs() if not each.is_over)
    assert len(logs(config)) == 1
