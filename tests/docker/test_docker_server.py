"""A judge that a run serves itself, in a container that other containers ask."""

from pathlib import Path

import docker
import pytest

from flows.pipeline.loading import load_config
from stages.store.base import Store
from tests.docker.containers import SERVER_IMAGE, left_of
from tests.fake_vllm import served_judge
from tests.flows.test_servers import QUICKSTART, logs, run, score_step, scores

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_containers_ask_the_server_and_it_ends_with_the_run(
    engine: docker.DockerClient, server_image: str, tmp_path: Path
) -> None:
    both = ("serve", "score")
    docker_settings = [
        *(f"execution.docker.images.{stage}={SERVER_IMAGE}" for stage in both),
        *(f"execution.docker.network.{stage}=bridge" for stage in both),
    ]
    options = [*served_judge(tmp_path), "execution.runner=docker", *docker_settings]
    config = load_config(QUICKSTART, options)
    with run(config) as executor:
        for shard in range(2):
            assert scores(executor, score_step(config, tmp_path, shard)) == [7.0] * 4
        assert len(left_of(engine, Store.open(config.store))) == 1
    assert left_of(engine, Store.open(config.store)) == []
    assert len(logs(config)) == 1
