"""Reaper: removes pods whose orchestrator is dead.

An orchestrator holds a lease in the store for each key that it looks after, which says on every
host that sees the store whether it lives. Pods of a store that is not to be seen here are left.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.attempt_log import left_log
from flows.runners.kubernetes.client import Cluster, explained
from flows.runners.kubernetes.diagnosis import ending_of, has_started, is_asked_to_end
from flows.runners.kubernetes.labels import (
    COMPONENT,
    DEATH,
    FULL_KEY,
    STORE_PLACE,
    Pod,
    annotation,
    label,
    name_of,
    selector,
)
from stages.contract.file_lease import FileLease


def sign_of(store: str, stage: str, key: str) -> Path:
    """File of the lease that the orchestrator of a key holds."""
    return Path(store) / "orchestrators" / stage / key


def orchestrator_lease(store: str, stage: str, key: str) -> FileLease:
    """The right to look after the pods of a key."""
    return FileLease(sign_of(store, stage, key))


def reap(cluster: Cluster, *, keep_running: bool) -> list[str]:
    """Removes pods that dead orchestrators left; a stage at work gets its grace period.

    Args:
        cluster: The cluster.
        keep_running: Leave pods at work that were told to outlive their orchestrator.

    Returns:
        A line for each pod that was removed.
    """
    removed = []
    for pod in cluster.pods(selector()).pods:
        if is_asked_to_end(pod):
            continue
        store, stage = annotation(pod, STORE_PLACE), label(pod, COMPONENT)
        key = annotation(pod, FULL_KEY)
        is_kept = annotation(pod, DEATH) == "keep" and ending_of(pod) is None
        if (is_kept and keep_running) or not Path(store).is_dir():
            continue
        if orchestrator_lease(store, stage, key).holder() is not None:
            continue
        _save_log(cluster, pod, left_log(Path(store), stage, key, name_of(pod)))
        cluster.delete_pod(name_of(pod))
        removed.append(f"removed pod {name_of(pod)}: its orchestrator is gone")
    return removed


def reap_cluster(settings: KubernetesSettings, *, keep_running: bool) -> list[str]:
    """:func:`reap` for the cluster and the namespace of these settings.

    Raises:
        UserError: No cluster is configured, or this account may not use it.
        StageFailedError: The cluster does not answer.
    """
    cluster = Cluster(settings)
    with explained(cluster):
        return reap(cluster, keep_running=keep_running)


def _save_log(cluster: Cluster, pod: Pod, log: Path) -> None:
    """Keeps what a pod has said since its orchestrator's death: it is nowhere else."""
    if not has_started(pod):
        return
    # Its node may be gone, and the log with it: then the API server refuses, or does not answer.
    with contextlib.suppress(ApiException, HTTPError), log.open("wb") as file:
        for line in cluster.log(name_of(pod), follow=False, since_seconds=None):
            file.write(line + b"\n")
