"""Kubernetes runner: each stage in a new pod, or in one pod for each of its nodes.

The orchestrator holds a lease in the store for what it looks after. Under ``on_orchestrator_death:
stop`` the supervisor in the pod ends the stage when that lease is not renewed any more. The next
orchestrator that wants the key takes over pods that still run.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from flows.pipeline.placement import Execution, KubernetesSettings
from flows.runners.command_lines import preflight_request
from flows.runners.kubernetes.attempt import PodAttempt
from flows.runners.kubernetes.client import Cluster, explain_api_errors
from flows.runners.kubernetes.diagnosis import Pod, ending_of, has_started, is_asked_to_end
from flows.runners.kubernetes.manifest import ATTEMPT, WORK, PodGroup, pods_for, work_label
from flows.runners.place import (
    NoRoomError,
    StageJob,
    Work,
    chown_outputs,
    work_name,
)
from stages.contract.errors import StageFailedError, UserError
from stages.contract.request import Resources
from stages.store.opening import local_folder, open_store


class KubernetesPlace:
    """A namespace of a cluster; UserError if no cluster is configured."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._user = user_of(execution.kubernetes)
        self._cluster = Cluster(execution.kubernetes)

    def find(self, job: StageJob) -> Work | None:
        """See :class:`flows.runners.place.Place`; pods that are not whole are removed."""
        attempts: dict[str, list[Pod]] = {}
        work = None
        with explain_api_errors(self._cluster):
            label = work_label(job.store.identity, job.request.key)
            for pod in self._cluster.pods(f"{WORK}={label}"):
                attempts.setdefault(pod["metadata"]["labels"][ATTEMPT], []).append(pod)
            for name, pods in attempts.items():
                if work is None and _is_whole(pods, job.request.resources.nodes):
                    work = PodAttempt(self._cluster, job, self._execution, name)
                    continue
                for pod in pods:
                    self._cluster.delete_pod(pod["metadata"]["name"])
        return work

    def start(self, job: StageJob) -> Work:
        """See :class:`flows.runners.place.Place`."""
        name = work_name(job.request)
        work = PodAttempt(self._cluster, job, self._execution, name)
        with explain_api_errors(self._cluster):
            try:
                for manifest in self._manifests(job, name):
                    self._cluster.create(manifest, job.request.resources.nodes)
            except BaseException:
                # All pods of an attempt are made, or none.
                work.remove()
                raise
        return work

    def _manifests(self, job: StageJob, name: str) -> list[Pod]:
        request = job.request
        store = job.store
        path = job.request_path
        if store.mirror_of is not None and self._execution.stages_fetch(store.mirror_of):
            path = open_store(store.mirror_of).share(Path(path))
        else:
            chown_outputs(request, *self._user)
        group = PodGroup(
            request,
            self._execution,
            name=name,
            user=self._user,
            request_path=path,
            store=store.identity,
            owner=store.folder_id,
        )
        return pods_for(group)


def _is_whole(pods: list[Pod], num_nodes: int) -> bool:
    """True while all pods of an attempt run.

    One that waits may do so for settings that have been corrected since.
    """
    at_work = [
        pod
        for pod in pods
        if has_started(pod) and ending_of(pod) is None and not is_asked_to_end(pod)
    ]
    return len(at_work) == num_nodes


def user_of(settings: KubernetesSettings) -> tuple[int, int]:
    """User and group of the stages; never root."""
    if settings.user is not None:
        uid, gid = settings.user.split(":")
        return int(uid), int(gid)
    if os.geteuid() == 0:
        raise UserError(
            "the orchestrator runs as root, and pods must not",
            "set execution.kubernetes.user, such as 1000:1000, or run geb as that user",
        )
    return os.geteuid(), os.getegid()


def check_pods(execution: Execution, resources: Mapping[str, Resources], store: str) -> None:
    """Checks pods of stages, with ``resources`` by their names, by dry runs: none is made.

    Raises:
        UserError: The cluster would refuse a pod, or a right is missing.
        StageFailedError: The cluster does not answer.
    """
    cluster = Cluster(execution.kubernetes)
    folder = str(local_folder(store))
    path = f"{store if execution.stages_fetch(store) else folder}/logs/any/key/request.json"
    user = user_of(execution.kubernetes)
    with explain_api_errors(cluster):
        for stage, limits in resources.items():
            request = preflight_request(stage, limits, folder)
            group = PodGroup(request, execution, "geb-preflight", user, path, folder, owner="")
            # A quota, and an API server that answers 5xx, may let it pass later.
            with contextlib.suppress(NoRoomError, StageFailedError):
                cluster.create(pods_for(group)[0], request.resources.nodes, dry_run=True)
