"""Pods of a request, without a cluster."""

import json
import os
import re

import pytest
import yaml

from flows.pipeline.loading import load_config
from flows.pipeline.placement import ClaimMount, Execution, KubernetesSettings
from flows.runners.kubernetes.manifest import PodGroup, pods_for
from flows.runners.place import chown_outputs, work_name
from stages.contract.errors import UserError
from stages.contract.request import FileInput, Resources
from stages.promote.params import PromoteParams
from stages.train.params import TrainParams
from tests.flows.loop import ROOT, write_config
from tests.stage_calls import request_of

# Volumes that Pod Security "restricted" allows; a path of the host is none of them.
ALLOWED_VOLUMES = {"persistentVolumeClaim", "emptyDir"}
CLUSTER = ROOT / "configs/cluster/kubernetes"


def pods(request, death="stop", **settings):
    values = {"image": "geb-core:1", "volumes": {request.store: {"claim": "store"}}} | settings
    # The folder of these requests' inputs, which do not exist.
    values["volumes"] = {"/nowhere": {"claim": "inputs"}} | values["volumes"]
    execution = Execution(
        kubernetes=KubernetesSettings.model_validate(values), on_orchestrator_death=death
    )
    path = f"{request.store}/request.json"
    name = work_name(request)
    return pods_for(PodGroup(request, execution, name, (1000, 1000), path, request.store, ""))


def pod(request, **settings):
    [manifest] = pods(request, **settings)
    return manifest


def container(request, **settings):
    [first] = pod(request, **settings)["spec"]["containers"]
    return first


def environment(request, **settings):
    return {variable["name"]: variable for variable in container(request, **settings)["env"]}


def test_settings_of_one_stage_s_pods_override_the_general_ones():
    stages = {"train": {"labels": {"pool": "b"}}}
    settings = KubernetesSettings.model_validate(
        {"shm_gib": 8, "labels": {"team": "a"}, "stages": stages}
    )
    # A resumed run has its settings from its record.
    recorded = KubernetesSettings.model_validate_json(settings.model_dump_json())
    for source in (settings, recorded):
        assert source.pod_of("train").shm_gib == 8
        assert source.pod_of("train").labels == {"team": "a", "pool": "b"}
        assert source.pod_of("pair").labels == {"team": "a"}


# Everything that a person may set of a pod, each to something.
EVERYTHING = {
    "spec": {
        "nodeSelector": {"pool": "a100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "low",
        "serviceAccountName": "reader",
        "schedulerName": "volcano",
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "registry"}],
    },
    "environment": {"A": "1"},
    "secrets": {"TOKEN": "hub/token"},
    "labels": {"kueue.x-k8s.io/queue-name": "research", "geb/attempt": "other"},
    "extra_resources": {"rdma/hca": 1},
    "fs_group": 3000,
    "gpu_resource": "amd.com/gpu",
    "user": "2000:2000",
    "shm_gib": 8,
    "tmp_gib": 8,
    "stages": {"pair": {"image": "other:1", "environment": {"B": "2"}}},
}


# Settings that are of no pod: where the cluster is, and how long something is waited for.
ELSEWHERE = {"namespace", "registry", "pending_seconds"}


def is_restricted(spec):
    """Level "restricted" of the Pod Security Standards, point by point."""
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert not {"initContainers", "ephemeralContainers"} & spec.keys()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for volume in spec["volumes"]:
        assert set(volume) - {"name"} <= ALLOWED_VOLUMES
    for container_ in spec["containers"]:
        context = container_["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert not context.get("privileged")
        assert "ports" not in container_
    return True


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["defaults", "everything set"])
def test_every_pod_holds_to_restricted(store, settings):
    resources = Resources(gpus=1, cpus=2, memory_gib=4, timeout_seconds=60)
    for manifest in pods(request_of(store, resources=resources), **settings):
        assert is_restricted(manifest["spec"])
        assert manifest["spec"]["automountServiceAccountToken"] is False


def test_everything_is_what_may_be_set_of_a_pod():
    # Images are set for a stage above, and volumes for each request.
    assert {*EVERYTHING, "image", "volumes"} == set(KubernetesSettings.model_fields) - ELSEWHERE
    assert set(ClaimMount.model_fields) == {"claim", "sub_path", "writable"}, "no path of the host"


def test_a_pod_is_restricted_and_takes_secrets_by_reference():
    spec = yaml.safe_load((CLUSTER / "run.yaml").read_text())["spec"]["template"]["spec"]
    assert is_restricted(spec)
    assert spec["serviceAccountName"] == "geb"
    [container] = spec["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "geb", "optional": True}}]
    assert {variable["name"] for variable in container["env"]} == {"HOME"}


@pytest.mark.parametrize("field", ["securityContext", "hostNetwork", "initContainers", "volumes"])
def test_no_setting_changes_what_a_pod_may_do(field):
    with pytest.raises(ValueError, match="spec"):
        KubernetesSettings.model_validate({"spec": {field: {}}})


@pytest.mark.parametrize("user", ["0:0", "0:1000", "root"])
def test_no_setting_makes_a_pod_run_as_root(user):
    with pytest.raises(ValueError, match="user"):
        KubernetesSettings(user=user)


def test_resources_are_limits_and_requests(store):
    resources = Resources(gpus=2, cpus=1.5, memory_gib=3, timeout_seconds=90.5)
    request = request_of(store, resources=resources)
    expected = {"cpu": "1500m", "memory": "3072Mi", "nvidia.com/gpu": "2"}
    assert container(request)["resources"] == {"limits": expected, "requests": expected}
    command = container(request)["command"]
    assert command[command.index("--limit") + 1] == "90.5"
    assert environment(request)["OMP_NUM_THREADS"]["value"] == "1"


def test_a_pod_has_the_settings_except_labels_of_the_runner(store):
    pair = pod(request_of(store), **EVERYTHING)
    assert pair["spec"]["nodeSelector"] == {"pool": "a100"}
    assert pair["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert pair["metadata"]["labels"]["geb/attempt"] != "other"
    image = environment(request_of(store), **EVERYTHING)["GEB_IMAGE"]["value"]
    assert image == "other:1", "the manifest records it"
    # Kubernetes takes the first toleration that matches a taint.
    assert pair["spec"]["tolerations"][0] == {"key": "gpu", "operator": "Exists"}
    variables = container(request_of(store), environment={"HOME": "/home/me"})["env"]
    homes = [variable["value"] for variable in variables if variable["name"] == "HOME"]
    assert homes == ["/home/me"]


def test_secrets_are_named_and_their_values_nowhere(store, monkeypatch):
    monkeypatch.setenv("TOKEN", "hidden-value")
    variables = environment(request_of(store), secrets={"TOKEN": "hub/token"})
    assert variables["TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "hidden-value" not in json.dumps(pods(request_of(store)))


def mounts(request, **settings):
    return {mount["mountPath"]: mount for mount in container(request, **settings)["volumeMounts"]}


def test_a_stage_may_write_only_its_folders_of_the_store(store):
    request = request_of(store)
    mounted = mounts(request)
    assert mounted[request.store]["readOnly"] is True
    artifacts = mounted[f"{request.store}/artifacts/pair"]
    assert (artifacts["readOnly"], artifacts["subPath"]) == (False, "artifacts/pair")
    assert f"{request.store}/models" not in mounted
    assert f"{request.store}/models" in mounts(request_of(store, PromoteParams()))


def test_a_claim_may_hold_the_store_in_a_folder(store):
    request = request_of(store)
    parent = str(store.root.parent)
    mounted = mounts(request, volumes={parent: {"claim": "shared", "sub_path": "team/geb"}})
    assert mounted[parent]["subPath"] == "team/geb"
    work = f"work/pair/{request.key}"
    assert mounted[f"{request.store}/{work}"]["subPath"] == f"team/geb/store/{work}"


def test_claims_of_any_names_are_volumes_of_their_own(store):
    request = request_of(store)
    claims = {"team.a", "team-a", "x" * 253}
    volumes = {f"/{claim}": {"claim": claim} for claim in claims}
    volumes[request.store] = {"claim": "store"}
    names = {
        volume["persistentVolumeClaim"]["claimName"]: volume["name"]
        for volume in pod(request, volumes=volumes)["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims < names.keys()
    assert len(set(names.values())) == len(names)
    assert all(re.fullmatch("[a-z0-9-]{1,63}", name) for name in names.values())


def test_a_volume_inside_another_comes_after_it(store):
    request = request_of(store)
    outer, inner = str(store.root.parent), request.store
    places = list(mounts(request, volumes={inner: {"claim": "b"}, outer: {"claim": "a"}}))
    assert places.index(outer) < places.index(inner) < places.index(f"{inner}/artifacts/pair")


def test_a_store_or_an_input_in_no_volume_is_refused(store):
    with pytest.raises(UserError, match=str(store.root)) as caught:
        pods(request_of(store), volumes={"/elsewhere": {"claim": "store"}})
    assert "execution.kubernetes.volumes" in caught.value.remedy
    policy = {"policy": [FileInput(location="/models/a", digest="1")]}
    with pytest.raises(UserError, match="/models/a lies in no volume"):
        pods(request_of(store, TrainParams(), inputs=policy))


@pytest.mark.parametrize(("place", "covered"), [("/srv/cache/geb", True), ("/home/me", False)])
def test_pods_without_the_bucket_s_cache_fetch_by_themselves(tmp_path, monkeypatch, place, covered):
    monkeypatch.setenv("GEB_CACHE", place)
    volumes = json.dumps({"/srv": {"claim": "cache"}})
    chosen = ["execution.runner=kubernetes", f"execution.kubernetes.volumes={volumes}"]
    execution = load_config(write_config(tmp_path, store="s3://bucket/prefix"), chosen).execution
    assert execution.stages_fetch("s3://bucket/prefix") is not covered
    assert not execution.stages_fetch("/srv/store")


def test_a_fetching_pod_has_room_and_no_folder_of_the_store(store):
    request = request_of(store)
    execution = Execution(kubernetes=KubernetesSettings(image="geb-core:1"), sync_seconds=7)
    url = "s3://bucket/prefix/logs/pair/key/request-1.json"
    [manifest] = pods_for(
        PodGroup(request, execution, "geb-x", (1000, 1000), url, store.identity, "here")
    )
    assert is_restricted(manifest["spec"])
    assert {volume["name"] for volume in manifest["spec"]["volumes"]} == {"cache", "tmp", "shm"}
    [container] = manifest["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    cache = variables["GEB_CACHE"]
    assert {"name": "cache", "mountPath": cache} in container["volumeMounts"]
    assert variables["GEB_SYNC_SECONDS"] == "7.0"
    assert variables["GEB_ORCHESTRATOR"] == "here"
    command = container["command"]
    assert command[-3:] == ["-m", "stages.pair", url]
    assert command[command.index("--sign") + 1] == f"{cache}/orchestrators/pair/{request.key}"
    assert str(store.root) not in json.dumps(manifest["spec"])


def test_several_nodes_are_pods_on_different_hosts(store):
    request = request_of(store, TrainParams(), resources=Resources(nodes=2))
    first, second = pods(request)
    command = second["spec"]["containers"][0]["command"]
    work = str(store.work_path("train", request.key))
    assert command[-3:] == ["-m", "stages.training.node", work]
    assert "stages.train" in first["spec"]["containers"][0]["command"]
    for manifest in (first, second):
        [term] = manifest["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        labels = manifest["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"] == {"geb/attempt": labels["geb/attempt"]}


@pytest.mark.parametrize(("death", "watches"), [("stop", True), ("keep", False)])
def test_the_supervisor_watches_for_a_sign_or_does_not(store, death, watches):
    command = container(request_of(store), death=death)["command"]
    assert ("--sign" in command) is watches


def test_names_and_labels_are_what_the_api_takes(store):
    request = request_of(store, run="A run_with.all" * 7, step="iteration-2/generate/0")
    metadata = pod(request)["metadata"]
    assert len(metadata["name"]) <= 63
    assert metadata["name"] == metadata["name"].lower()
    assert all(len(value) <= 63 for value in metadata["labels"].values())


def test_a_stage_s_user_gets_no_finished_artifact(request_, store, monkeypatch):
    artifacts = store.root / "artifacts/probe"
    work = store.work_path("probe", request_.key)
    scratch = artifacts / f".scratch-{request_.key}-1"
    lease = store.root / "leases/probe" / request_.key
    others = [artifacts / "finished/manifest.json", lease.with_name("another")]
    for file in (work / "chunks/1", scratch / "rows", lease, *others):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    given = set()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, *user, follow_symlinks: given.add(path))
    chown_outputs(request_, 1000, 1000)
    assert {artifacts, work, work / "chunks/1", scratch / "rows", lease} <= given
    assert not given & {artifacts / "finished", *others}
