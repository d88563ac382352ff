"""Kubernetes runner: each stage in a pod of its own, or in one for each of its nodes.

The orchestrator holds a lease in the store for what it looks after. Under ``on_orchestrator_death:
stop`` the supervisor in the pod ends the stage when that lease is not renewed any more. The next
orchestrator that wants the key takes over pods that still run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kubernetes.client.exceptions import ApiException

from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.attempt_log import AttemptLog, write_request
from flows.runners.base import OnEvent, log_once
from flows.runners.kubernetes.attempt import PodAttempt
from flows.runners.kubernetes.client import Cluster, check_rights, explained, reason_of
from flows.runners.kubernetes.diagnosis import QuotaInUseError, ending_of, is_asked_to_end, refused
from flows.runners.kubernetes.images import Images
from flows.runners.kubernetes.labels import (
    ATTEMPT,
    NODE,
    NODES,
    Pod,
    annotation,
    label,
    name_of,
    selector,
)
from flows.runners.kubernetes.manifest import Attempt, attempt_name, pods_for
from flows.runners.kubernetes.reaper import orchestrator_lease, reap, sign_of
from flows.runners.kubernetes.watch import PodWatch
from flows.runners.local.outputs import chown_outputs
from flows.runners.outcome import Ending
from flows.runners.place import PlaceRunner
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Event, Log
from stages.contract.request import Request

_QUOTA_POLL_SECONDS = 5.0
_log = logging.getLogger(__name__)


class KubernetesPlace:
    """A namespace of a cluster. Constructing one removes pods of dead orchestrators.

    Args:
        settings: Cluster, images, volumes, places.
        grace_seconds: Time between SIGTERM and SIGKILL when a stage is stopped.

    Raises:
        UserError: No cluster is configured, or this account may not use it.
        StageFailedError: The cluster does not answer.
    """

    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings, grace_seconds: float) -> None:
        self._settings = settings
        self._grace_seconds = grace_seconds
        self._images = Images(settings)
        self._uid, self._gid = user_of(settings)
        self._cluster = Cluster(settings)
        self._watches: dict[str, PodWatch] = {}
        self._watches_lock = threading.Lock()
        with explained(self._cluster):
            check_rights(self._cluster)
            self._owner = _owner_of(self._cluster, settings)
            for line in reap(self._cluster, keep_running=True):
                _log.warning(line)

    @contextlib.contextmanager
    def owning(
        self, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> Iterator[Callable[[], None]]:
        """See :class:`flows.runners.place.Place`."""
        lease = orchestrator_lease(request.store, request.stage, request.key)
        with explained(self._cluster):
            lease.acquire(
                waiting=lambda holder: on_event(
                    Log(message=f"another run on {holder['host']} looks after it; waiting for it")
                ),
                stopping=stopping,
            )
            with lease:
                yield lease.check

    def find(
        self, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> PodAttempt | None:
        """See :class:`flows.runners.place.Place`; pods that are not whole are removed."""
        taken = None
        for pods in self._attempts(request):
            if taken is None and _is_whole(pods):
                taken = self._attempt(request, pods, on_event)
                continue
            for pod in pods:
                self._cluster.delete_pod(name_of(pod))
        return taken

    def submit(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> PodAttempt:
        """See :class:`flows.runners.place.Place`."""
        pods = self._create(request, on_event, stopping)
        return self._attempt(request, pods, on_event)

    def follow(
        self,
        work: PodAttempt,
        request: Request,
        logs: Sequence[AttemptLog],
        on_event: OnEvent,
        stopping: threading.Event,
        check_owner: Callable[[], None],
    ) -> list[Ending]:
        """See :class:`flows.runners.place.Place`."""

        def handle(node: int, line: str) -> None:
            # Other nodes' events are in their logs alone.
            logs[node].handle_line(line, on_event if node == 0 else _ignore)

        return work.follow(self._watch(request), handle, check_owner, stopping)

    def end(self, works: Sequence[PodAttempt]) -> None:
        """Does nothing: who follows pods ends them, once it sees that the run stops."""

    def close(self, work: PodAttempt) -> None:
        """See :class:`flows.runners.place.Place`."""
        work.remove()

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        with explained(self._cluster):
            if not any(_is_whole(pods) for pods in self._attempts(request)):
                return False
        lease = orchestrator_lease(request.store, request.stage, request.key)
        return lease.holder() is None

    def _attempt(self, request: Request, pods: Sequence[Pod], on_event: OnEvent) -> PodAttempt:
        return PodAttempt(
            self._cluster,
            request,
            self._settings,
            self._grace_seconds,
            pods,
            on_event,
            on_start=lambda pod: self._images.learn(request, pod),
        )

    def _watch(self, request: Request) -> PodWatch:
        with self._watches_lock:
            if request.store not in self._watches:
                self._watches[request.store] = PodWatch(
                    self._cluster, selector(store=request.store)
                )
            return self._watches[request.store]

    def _attempts(self, request: Request) -> list[list[dict[str, Any]]]:
        """Pods for a key, by attempt, each in the order of its nodes."""
        attempts: dict[str, list[dict[str, Any]]] = {}
        for pod in self._cluster.pods(selector(store=request.store, key=request.key)).pods:
            attempts.setdefault(label(pod, ATTEMPT), []).append(pod)
        return [sorted(pods, key=lambda pod: int(label(pod, NODE))) for pods in attempts.values()]

    def _create(
        self, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> list[dict[str, Any]]:
        chown_outputs(request, self._uid, self._gid)
        attempt = Attempt(
            name=attempt_name(request, uuid.uuid4().hex[:6]),
            image=self._images.find(request),
            uid=self._uid,
            gid=self._gid,
            request_path=write_request(request),
            sign=sign_of(request.store, request.stage, request.key),
            grace_seconds=self._grace_seconds,
            owner=self._owner,
        )
        manifests = pods_for(request, self._settings, attempt)
        say = log_once(on_event)
        rounds = max(1, round(self._settings.pending_seconds / _QUOTA_POLL_SECONDS))
        for left in reversed(range(rounds)):
            try:
                return self._create_all(request, manifests)
            except QuotaInUseError as error:
                if not left:
                    raise
                say(f"waiting: {error}")
            if stopping.wait(_QUOTA_POLL_SECONDS):
                break
        raise StoppedError(f"{request.place}: stopped while waiting for the quota")

    def _create_all(
        self, request: Request, manifests: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Creates all pods of an attempt, or none."""
        made: list[dict[str, Any]] = []
        try:
            for manifest in manifests:
                made.append(self._cluster.create_pod(manifest))
        except BaseException as error:
            for pod in made:
                self._cluster.delete_pod(name_of(pod))
            if isinstance(error, ApiException):
                where = request.place
                said = reason_of(error)
                raise refused(error.status, said, where, request.stage) from error
            raise
        return made


def _is_whole(pods: list[dict[str, Any]]) -> bool:
    """True while all pods of an attempt are there and at work."""
    at_work = [pod for pod in pods if ending_of(pod) is None and not is_asked_to_end(pod)]
    return len(at_work) == int(annotation(pods[0], NODES) or 1)


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


def _owner_of(cluster: Cluster, settings: KubernetesSettings) -> dict[str, Any] | None:
    """The orchestrator's own pod as the owner of its stages' pods, which go when it is deleted."""
    if settings.on_orchestrator_death == "keep":
        return None
    own = cluster.own_pod()
    if own is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": name_of(own),
        "uid": own["metadata"]["uid"],
    }


class KubernetesRunner(PlaceRunner[PodAttempt]):
    """Runs each stage in pods; see :class:`KubernetesPlace`."""

    def __init__(self, settings: KubernetesSettings, grace_seconds: float = 30.0) -> None:
        super().__init__(KubernetesPlace(settings, grace_seconds))


def _ignore(event: Event) -> None:
    """Events of other nodes: the first one repeats what counts."""
