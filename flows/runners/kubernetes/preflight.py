"""Preflight: what a cluster would refuse, found by server-side dry runs before the first stage."""

import contextlib
import re
from http.client import NOT_FOUND

from kubernetes.client.exceptions import ApiException

from flows.pipeline.placement import Execution
from flows.runners.health import trial_request
from flows.runners.kubernetes.client import Cluster, check_rights, explained, reason_of
from flows.runners.kubernetes.diagnosis import QuotaInUseError, refused
from flows.runners.kubernetes.manifest import Attempt, Pod, pods_for
from flows.runners.kubernetes.runner import user_of
from stages.contract.errors import UserError
from stages.contract.params import Settings
from stages.store.opening import local_folder

# The API server takes any name; a node then cannot pull it. Host, folders, tag, digest.
_IMAGE = re.compile(
    r"([A-Za-z0-9.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)


def check_pods(execution: Execution, resources: Settings, store: str) -> None:
    """Checks the pods of all stages, none of which is made.

    Raises:
        UserError: The cluster would refuse a pod, or a right or a claim is missing.
        StageFailedError: The cluster does not answer.
    """
    cluster, folder = Cluster(execution.kubernetes), str(local_folder(store))
    path = f"{store if execution.stages_fetch(store) else folder}/logs/any/key/request.json"
    user = user_of(execution.kubernetes)
    with explained(cluster):
        check_rights(cluster)
        for stage in type(resources).model_fields:
            request = trial_request(stage, getattr(resources, stage), key="0" * 64, store=folder)
            pod, *_ = pods_for(Attempt(request, execution, "geb-preflight", user, path, folder))
            _check_pod(cluster, pod, stage)
        for claim in sorted({each.claim for each in execution.kubernetes.volumes.values()}):
            _check_claim(cluster, claim)


def _check_pod(cluster: Cluster, pod: Pod, stage: str) -> None:
    [container] = pod["spec"]["containers"]
    if not _IMAGE.fullmatch(image := container["image"]):
        raise UserError(
            f"{stage}: no image can be called {image!r}",
            "correct execution.kubernetes.registry, or image of the stage",
        )
    try:
        cluster.create_pod(pod, dry_run=True)
    except ApiException as error:
        found = refused(error.status, reason_of(error), stage, stage)
        # Other pods that use up a quota end some time.
        with contextlib.suppress(QuotaInUseError):
            raise found from error


def _check_claim(cluster: Cluster, name: str) -> None:
    try:
        phase = cluster.claim(name)["status"].get("phase")
    except ApiException as error:
        if error.status != NOT_FOUND:
            raise
        phase = None
    # A pending one may wait for its first pod.
    if phase in (None, "Lost"):
        found = "no claim" if phase is None else "only the lost claim"
        raise UserError(
            f"there is {found} {name!r} in the namespace {cluster.namespace!r} of {cluster.server}",
            "create it (`kubectl apply -k configs/cluster/kubernetes` makes one), or correct "
            "execution.kubernetes.volumes",
        )
