"""Rights of the orchestrator: the shipped role has what it needs, and nothing else."""

import base64
import json

import pytest
import yaml
from kubernetes import client

from flows.runners.kubernetes.place import check_pods
from stages.contract.errors import PreemptedError
from stages.contract.request import Resources
from tests.at_work import at_work
from tests.flows.loop import ROOT
from tests.flows.probes import wait_until
from tests.kubernetes.cluster import kubectl

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

BASE = ROOT / "configs/cluster/kubernetes"


def objects():
    """Objects that the kustomization makes, by kind."""
    manifests = yaml.safe_load_all(kubectl("kustomize", str(BASE)))
    return {manifest["kind"]: manifest for manifest in manifests}


@pytest.fixture
def account(cluster, tmp_path):
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


def _kubeconfig(namespace):
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

    def made():
        return kubectl("-n", namespace, "get", "secret", "geb-test-token", "-o", path)

    wait_until(made)
    config["users"] = [{"name": "geb", "user": {"token": base64.b64decode(made()).decode()}}]
    config["contexts"][0]["context"]["user"] = "geb"
    return dict(config)


def test_the_shipped_files_install(cluster):
    manifests = objects()
    assert set(manifests) == {
        *("Namespace", "ServiceAccount", "Role", "RoleBinding", "PersistentVolumeClaim")
    }
    assert manifests["Namespace"]["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    kubectl("apply", "-k", str(BASE))
    try:
        kubectl("-n", "geb", "get", "serviceaccount/geb", "role/geb", "pvc/geb")
    finally:
        kubectl("delete", "-k", str(BASE), "--wait=false")


def test_the_role_is_what_the_runner_uses_and_no_more(launcher, store, account, monkeypatch):
    """A stage runs under the account to its end, and every right is made use of."""
    used = set()
    call = client.ApiClient.call_api

    def recorded(self, method, url, *rest, **options):
        if "/v1/" in url:
            used.add(_right(method, url))
        return call(self, method, url, *rest, **options)

    monkeypatch.setattr(client.ApiClient, "call_api", recorded)
    request = launcher.request(store, behaviour="hang")
    with monkeypatch.context() as patch:
        patch.setenv("KUBECONFIG", account)
        resources = {"train": Resources()}
        check_pods(launcher.execution(request), resources, request.store)
        runner = launcher.runner(request)
    with at_work(request, runner) as work:
        launcher.take_machine(work)
        assert isinstance(work.join(), PreemptedError)
    granted = {
        (resource, verb)
        for rule in objects()["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == used


def _right(method, url):
    place = url.partition("?")[0].partition("/v1/")[2].split("/")
    names = place[2:] if place[0] == "namespaces" else place
    resource = "/".join([names[0], *names[2:]])
    if method == "GET" and len(names) == 1:
        return resource, "list"
    return resource, {"GET": "get", "POST": "create", "DELETE": "delete"}[method]
