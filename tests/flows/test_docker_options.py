"""Options of a request's container, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.pipeline.placement import DockerSettings
from flows.runners.docker.images import images_for
from flows.runners.docker.options import (
    container_options,
    environment_for,
    host_options,
    mounts_for,
    needs_network,
)
from stages.contract.local_store import LocalStore
from stages.contract.params import StageParams
from stages.contract.request import FileInput, HubInput, Request, Resources, make_request
from stages.generate.params import GenerateParams
from stages.pair.params import PairParams
from stages.prepare.params import PrepareParams
from stages.promote.params import PromoteParams
from stages.score.params import ScoreParams
from stages.train.params import TrainParams
from tests.stage_calls import stand_ins

HUB = HubInput(repo="owner/model", revision="0" * 40)
HUB_PROMPTS = HUB.model_copy(update={"repo_type": "dataset"})


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(str(tmp_path / "store"), create=True)


def request_for(store: LocalStore, params: StageParams | None = None, **fields: Any) -> Request:
    params = params or PairParams()
    inputs = stand_ins(params) | fields.pop("inputs", {})
    return make_request(params, inputs=inputs, seed=0, store=str(store.root), **fields)


@pytest.mark.parametrize(
    ("params", "inputs", "gpus", "titles"),
    [
        (PairParams(), {}, 0, ["core"]),
        (PromoteParams(), {}, 0, ["core"]),
        (PrepareParams(), {}, 0, ["core"]),
        (PrepareParams(), {"train": [HUB_PROMPTS]}, 0, ["torch-cpu", "torch-gpu"]),
        (ScoreParams(), {}, 0, ["torch-cpu", "torch-gpu"]),
        (TrainParams(), {}, 2, ["torch-gpu"]),
        (GenerateParams(), {}, 0, ["torch-cpu", "torch-gpu"]),
        (GenerateParams(backend="vllm"), {}, 0, ["vllm-cpu", "vllm-gpu"]),
        (GenerateParams(backend="vllm"), {}, 1, ["vllm-gpu"]),
    ],
)
def test_each_stage_has_its_image(
    store: LocalStore, params: StageParams, inputs: Any, gpus: int, titles: list[str]
) -> None:
    request = request_for(store, params, inputs=inputs, resources=Resources(gpus=gpus))
    assert [image.title for image in images_for(request)] == titles


def test_gpus_are_asked_for_by_name(store: LocalStore) -> None:
    [wanted] = host_options(request_for(store), DockerSettings(), ["0", "3"])["device_requests"]
    assert wanted["DeviceIDs"] == ["0", "3"]
    assert wanted["Capabilities"] == [["gpu"]]
    assert host_options(request_for(store), DockerSettings())["device_requests"] is None


def test_a_network_only_where_it_is_declared(store: LocalStore) -> None:
    settings = DockerSettings(network={"score": "bridge"})
    assert host_options(request_for(store), settings)["network_mode"] == "none"
    scoring = request_for(store, ScoreParams())
    assert host_options(scoring, settings)["network_mode"] == "bridge"
    assert "HF_HUB_OFFLINE" in environment_for(request_for(store), settings)
    assert "HF_HUB_OFFLINE" not in environment_for(scoring, settings)


def test_something_of_the_hub_needs_a_network_or_a_cache(store: LocalStore) -> None:
    request = request_for(store, TrainParams(), inputs={"policy": [HUB]})
    assert needs_network(request, DockerSettings())
    assert not needs_network(request, DockerSettings(network={"train": "bridge"}))
    assert not needs_network(request, DockerSettings(model_cache="/models"))
    assert not needs_network(request_for(store), DockerSettings())


def modes(request: Request, settings: DockerSettings) -> dict[str, str]:
    return {
        each["Target"]: "ro" if each["ReadOnly"] else "rw" for each in mounts_for(request, settings)
    }


def test_only_promote_writes_into_the_registry(store: LocalStore) -> None:
    models = str(store.root / "models")
    assert models not in modes(request_for(store), DockerSettings())
    assert modes(request_for(store, PromoteParams()), DockerSettings())[models] == "rw"


def test_inputs_are_mounted_where_they_are_and_what_their_links_lead_to(
    store: LocalStore, tmp_path: Path
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "abc").write_text("weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "config.json").write_text("{}")
    inside = store.root / "artifacts/sft/key/checkpoint"
    inputs = {
        "policy": [FileInput(location=str(snapshot), digest="1")],
        "reference": [FileInput(location=str(inside), digest="2")],
    }
    found = modes(request_for(store, TrainParams(), inputs=inputs), DockerSettings())
    assert found[str(snapshot)] == "ro"
    assert found[str(blobs / "abc")] == "ro"
    # The store is there as a whole.
    assert str(inside) not in found


def test_the_settings_add_mounts_and_variables(store: LocalStore) -> None:
    settings = DockerSettings(
        mounts={"/data": "ro", "/scratch": "rw"},
        model_cache="/cache",
        environment={"pair": {"TZ": "UTC"}, "train": {"OTHER": "1"}},
    )
    request = request_for(store, resources=Resources(cpus=2.5))
    found = modes(request, settings)
    assert (found["/data"], found["/scratch"], found["/models"]) == ("ro", "rw", "rw")
    environment = environment_for(request, settings)
    assert environment["TZ"] == "UTC"
    assert environment["HF_HOME"] == "/models"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "OTHER" not in environment


@pytest.mark.parametrize(("death", "detached"), [("stop", False), ("keep", True)])
def test_stdin_ends_with_the_orchestrator_or_does_not(
    store: LocalStore, death: Any, detached: bool
) -> None:
    made = container_options(
        request_for(store),
        DockerSettings(on_orchestrator_death=death),
        image="geb-core:0.1.0@sha256:1",
        user="1:1",
        command=["python"],
        alive=store.root / "containers/x",
    )
    assert made["stdin_open"] is True
    assert made["detach"] is detached
    assert made["labels"]["geb.on_orchestrator_death"] == death
    assert made["environment"]["GEB_IMAGE"] == "geb-core:0.1.0@sha256:1"
