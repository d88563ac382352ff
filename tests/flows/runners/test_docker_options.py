"""Containers without an engine: the image of a stage, its options, its lines and its ends."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.pipeline.config import RunConfig
from flows.pipeline.placement import DockerSettings
from flows.runners.choose import check_host
from flows.runners.docker.images import find_image
from flows.runners.docker.options import (
    container_options,
    environment_for,
    mounts_for,
    needs_network,
)
from flows.runners.images import CODE_LABEL, image_tags
from stages.contract.errors import UserError
from stages.contract.request import FileInput, HubInput, Resources
from stages.generate.params import GenerateParams
from stages.pair.params import PairParams
from stages.prepare.params import PrepareParams
from stages.promote.params import PromoteParams
from stages.score.params import ScoreParams
from stages.store.base import Store
from stages.train.params import TrainParams
from tests.stage_calls import request_of

HUB = HubInput(repo="owner/model", revision="0" * 40)
HUB_PROMPTS = HUB.model_copy(update={"repo_type": "dataset"})


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
def test_each_stage_has_its_image(store, params, inputs, gpus, titles):
    request = request_of(store, params, inputs=inputs, resources=Resources(gpus=gpus))
    tags = image_tags(request.image, gpus=request.resources.gpus)
    assert [re.sub(r"geb-(\w+):[\d.]+", r"\1", tag) for tag in tags] == titles


def options(request, settings=None, *devices):
    return container_options(
        request,
        Store(Path(request.store)),
        settings or DockerSettings(),
        image="geb-core:0.1.0@sha256:1",
        user="1:1",
        command=["python"],
        devices=devices,
    )


def test_gpus_are_asked_for_by_name(store):
    [device] = options(request_of(store), None, "0", "3")["device_requests"]
    assert device["DeviceIDs"] == ["0", "3"]
    assert device["Capabilities"] == [["gpu"]]
    assert options(request_of(store))["device_requests"] is None


def test_a_container_has_few_rights_and_is_found_by_its_labels(store):
    resources = Resources(memory_gib=2, cpus=1.5)
    request = request_of(store, resources=resources)
    chosen = options(request, DockerSettings(shm_gib=0.125))
    assert (chosen["cap_drop"], chosen["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert (chosen["read_only"], chosen["ipc_mode"]) == (True, "private")
    assert chosen["mem_limit"] == chosen["memswap_limit"] == 2 << 30, "nothing is swapped out"
    assert (chosen["nano_cpus"], chosen["pids_limit"]) == (1_500_000_000, 4096)
    assert chosen["shm_size"] == 2**27
    assert chosen["stdin_open"] is True, "stdin ends with the orchestrator"
    assert chosen["environment"]["GEB_IMAGE"] == "geb-core:0.1.0@sha256:1"
    assert modes(request, DockerSettings())[str(store.root)] == "ro"
    assert chosen["labels"] == {
        "geb.stage": "pair",
        "geb.key": request.key,
        "geb.store": store.identity,
        "geb.gpus": "",
    }


def test_a_network_only_where_it_is_declared(store):
    settings = DockerSettings(network={"score": "bridge"})
    assert options(request_of(store), settings)["network_mode"] == "none"
    scoring = request_of(store, ScoreParams())
    assert options(scoring, settings)["network_mode"] == "bridge"
    assert "HF_HUB_OFFLINE" in environment_for(request_of(store), settings)
    assert "HF_HUB_OFFLINE" not in environment_for(scoring, settings)


def test_something_of_the_hub_needs_a_network_or_a_cache(store):
    request = request_of(store, TrainParams(), inputs={"policy": [HUB]})
    assert needs_network(request, DockerSettings())
    assert not needs_network(request, DockerSettings(network={"train": "bridge"}))
    assert not needs_network(request, DockerSettings(environment={"train": {"HF_HOME": "/models"}}))
    assert not needs_network(request_of(store), DockerSettings())


def modes(request, settings):
    return {
        mount["Target"]: "ro" if mount["ReadOnly"] else "rw"
        for mount in mounts_for(request, Store(Path(request.store)), settings)
    }


def test_only_promote_writes_into_the_registry(store):
    models = str(store.root / "models")
    assert models not in modes(request_of(store), DockerSettings())
    assert modes(request_of(store, PromoteParams()), DockerSettings())[models] == "rw"


def test_inputs_are_mounted_at_their_paths_with_their_links_targets(store, tmp_path):
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
    mounted = modes(request_of(store, TrainParams(), inputs=inputs), DockerSettings())
    assert mounted[str(snapshot)] == "ro"
    assert mounted[str(blobs / "abc")] == "ro"
    # The store is there as a whole.
    assert str(inside) not in mounted


def test_the_settings_add_mounts_and_variables(store):
    settings = DockerSettings(
        mounts={"/data": "ro", "/scratch": "rw"},
        environment={"pair": {"TZ": "UTC"}, "train": {"OTHER": "1"}},
    )
    request = request_of(store, resources=Resources(cpus=2.5))
    mounted = modes(request, settings)
    assert (mounted["/data"], mounted["/scratch"]) == ("ro", "rw")
    environment = environment_for(request, settings)
    assert environment["TZ"] == "UTC"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "OTHER" not in environment


def test_an_image_of_other_code_is_refused(request_):
    old = SimpleNamespace(labels={CODE_LABEL: "other"})
    engine = SimpleNamespace(images=SimpleNamespace(get=lambda name: old))
    with pytest.raises(UserError, match="holds other code") as caught:
        find_image(engine, DockerSettings(images={"probe": "registry/geb-probe:1"}), request_)
    assert "docker/build.sh" in caught.value.remedy


def test_a_secret_that_is_not_set_is_named_before_a_run(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    docker = {"secrets": {"score": ["JUDGE_KEY"]}}
    config = RunConfig(execution={"runner": "docker", "docker": docker})
    with pytest.raises(UserError, match=r"secrets\.score names JUDGE_KEY"):
        check_host(config, {"generate", "score"})
