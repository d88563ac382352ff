"""Rights of the orchestrator: the shipped role has what it needs, and nothing else."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.kubernetes.client import RIGHTS
from flows.runners.kubernetes.runner import KubernetesRunner
from stages.contract.errors import PreemptedError, UserError
from stages.contract.local_store import LocalStore
from tests.at_work import at_work
from tests.flows.loop import ROOT
from tests.flows.probes import hanging_pids, wait_until
from tests.kubernetes.cluster import CPUS, USER, Namespace, kubectl
from tests.kubernetes.pods import ORCHESTRATOR, probe_settings, request_for

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

BASE = ROOT / "configs/cluster/kubernetes"


def objects() -> dict[str, Any]:
    """Objects that the kustomization makes, by kind."""
    made = yaml.safe_load_all(kubectl("kustomize", str(BASE)))
    return {each["kind"]: each for each in made}


@pytest.fixture
def account(cluster: Namespace, tmp_path: Path) -> Iterator[str]:
    """A kubeconfig of the shipped service account, in the tests' namespace."""
    folder = tmp_path / "kustomization"
    folder.mkdir()
    overlay = {"namespace": cluster.name, "resources": ["role.yaml"]}
    (folder / "role.yaml").write_text((BASE / "role.yaml").read_text())
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kubectl("apply", "-k", str(folder))
    path = tmp_path / "account.kubeconfig"
    path.write_text(json.dumps(_kubeconfig(cluster.name)))
    yield str(path)
    kubectl("delete", "-k", str(folder))


def _kubeconfig(namespace: str) -> dict[str, Any]:
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    token = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": "geb-test-token",
            "annotations": {"kubernetes.io/service-account.name": "geb"},
        },
        "type": "kubernetes.io/service-account-token",
    }
    kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(token))
    path = "jsonpath={.data.token}"

    def made() -> str:
        return kubectl("-n", namespace, "get", "secret", "geb-test-token", "-o", path)

    wait_until(made)
    config["users"] = [{"name": "geb", "user": {"token": base64.b64decode(made()).decode()}}]
    config["contexts"][0]["context"]["user"] = "geb"
    return dict(config)


def test_the_shipped_files_install(cluster: Namespace) -> None:
    found = objects()
    assert set(found) == {
        *("Namespace", "ServiceAccount", "Role", "RoleBinding", "PersistentVolumeClaim"),
    }
    assert found["Namespace"]["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    kubectl("apply", "-k", str(BASE))
    try:
        kubectl("-n", "geb", "get", "serviceaccount/geb", "role/geb", "pvc/geb")
    finally:
        kubectl("delete", "-k", str(BASE), "--wait=false")


def test_the_role_is_what_the_runner_uses_and_no_more(
    store: LocalStore, cluster: Namespace, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage runs under the account to its end, and every right is made use of."""
    used = set()
    call = client.ApiClient.call_api

    def recorded(self: Any, method: str, url: str, *rest: Any, **options: Any) -> Any:
        used.add(_right(method, url))
        return call(self, method, url, *rest, **options)

    monkeypatch.setattr(client.ApiClient, "call_api", recorded)
    request = request_for(store, behaviour="hang")
    settings = probe_settings(cluster, request, kubeconfig=account)
    with at_work(request, KubernetesRunner(settings, grace_seconds=1)) as work:
        [pod] = cluster.pods()
        kubectl("-n", cluster.name, "delete", "pod", pod["metadata"]["name"], "--wait=false")
        assert isinstance(work.join(), PreemptedError)
    # Everybody may ask for his own rights.
    assert used - {("selfsubjectaccessreviews", "create")} == set(RIGHTS)
    granted = {
        (resource, verb)
        for rule in objects()["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == set(RIGHTS)


def _right(method: str, url: str) -> tuple[str, str]:
    place = url.partition("?")[0].partition("/v1/")[2].split("/")
    names = place[2:] if place[0] == "namespaces" else place
    resource = "/".join([names[0], *names[2:]])
    if method == "GET" and len(names) == 1:
        return resource, "watch" if "watch=True" in url or "watch=true" in url else "list"
    return resource, {"GET": "get", "POST": "create", "DELETE": "delete"}[method]


def test_a_missing_right_is_told_before_the_first_stage(
    store: LocalStore, cluster: Namespace, account: str
) -> None:
    role = objects()["Role"]
    role["metadata"]["namespace"] = cluster.name
    role["rules"][0]["verbs"].remove("watch")
    cluster.apply(role)
    settings = probe_settings(cluster, request_for(store), kubeconfig=account)
    with pytest.raises(UserError, match="this account may not watch pods") as caught:
        KubernetesRunner(settings)
    assert "kubectl apply -k configs/cluster/kubernetes" in caught.value.remedy


def test_an_orchestrator_in_a_pod_owns_its_stages_pods(
    store: LocalStore, cluster: Namespace, account: str
) -> None:
    """It uses its service account, and its pods are gone soon after it is."""
    request = request_for(store, behaviour="hang")
    path = store.root / "request.json"
    request.write(path)
    for folder in [store.root, *store.root.rglob("*")]:
        os.chown(folder, USER, USER)
    settings = probe_settings(cluster, request)
    program = [sys.executable, "-c", ORCHESTRATOR, str(path), settings.model_dump_json()]
    cluster.apply(_orchestrator(settings, program, writable=str(store.root)))
    wait_until(lambda: hanging_pids(store.root))
    [own] = [pod for pod in cluster.pods() if pod["metadata"]["name"] != "orchestrator"]
    [owner] = own["metadata"]["ownerReferences"]
    assert owner["name"] == "orchestrator"
    kubectl("-n", cluster.name, "delete", "pod", "orchestrator", "--now")
    wait_until(lambda: cluster.pods() == [])


def _orchestrator(
    settings: KubernetesSettings, program: list[str], writable: str
) -> dict[str, Any]:
    """A pod that runs a program as the shipped service account."""
    mounts = [
        {
            "name": "machine",
            "mountPath": place,
            "subPath": volume.sub_path,
            "readOnly": place != writable,
        }
        for place, volume in settings.volumes.items()
    ]
    environment = settings.environment | {"HOME": "/tmp", "NO_PROXY": "*"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "orchestrator"},
        "spec": {
            "serviceAccountName": "geb",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsUser": USER, "runAsGroup": USER},
            "containers": [
                {
                    "name": "geb",
                    "image": settings.image,
                    "command": program,
                    "env": [{"name": name, "value": environment[name]} for name in environment],
                    "resources": {"requests": {"cpu": str(CPUS)}},
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [
                {"name": "machine", "persistentVolumeClaim": {"claimName": "machine"}},
            ],
        },
    }
