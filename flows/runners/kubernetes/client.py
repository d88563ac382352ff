"""Requests of the runner to a cluster: pods, logs and events of one namespace, and its rights.

Objects are plain dictionaries, as the API has them: the client's models take a multiple of the
time, and refuse what their version of the API did not know.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from flows.pipeline.kubernetes import KubernetesSettings
from stages.contract.errors import StageFailedError, UserError

UNREACHABLE = (urllib3.exceptions.HTTPError, OSError)
"""Errors of an API server that does not answer."""
RIGHTS_REMEDY = (
    "give the orchestrator's account the role: `kubectl apply -k configs/cluster/kubernetes`"
)
GONE = 404
RELIST = 410
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_TIMEOUT_SECONDS = 60.0
# A stage may be silent for long; a connection that is has perhaps been lost.
_SILENT_SECONDS = 600.0


@dataclass(frozen=True)
class PodList:
    """Pods at one moment.

    Attributes:
        pods: The pods.
        version: Version of the list, from which a watch goes on.
    """

    pods: list[dict[str, Any]]
    version: str


class Cluster:
    """Requests to one namespace of a cluster. Safe to use from several threads.

    Args:
        settings: Which cluster, and which namespace of it.

    Raises:
        UserError: There is no configuration of a cluster, or it has no such context.
    """

    def __init__(self, settings: KubernetesSettings) -> None:
        made, self.namespace = _configuration(settings)
        # One connection for each stage's log, which stays open.
        made.connection_pool_maxsize = 64
        made.retries = False
        self.server = str(made.host)
        connection = client.ApiClient(made)
        self._api = client.CoreV1Api(connection)
        self._authorization = client.AuthorizationV1Api(connection)

    def create_pod(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Creates a pod; see :func:`flows.runners.kubernetes.diagnosis.refused` for its errors."""
        return self._json(
            self._api.create_namespaced_pod(self.namespace, dict(manifest), **_options())
        )

    def delete_pod(self, name: str, grace_seconds: int | None = None) -> None:
        """Asks a pod to end; nothing happens where there is none.

        Args:
            name: Name of the pod.
            grace_seconds: Time between SIGTERM and SIGKILL; 0 forgets the pod at once, whether its
                node answers or not. Unset takes the pod's own.
        """
        options = {} if grace_seconds is None else {"grace_period_seconds": grace_seconds}
        try:
            self._api.delete_namespaced_pod(name, self.namespace, **options, **_options())
        except ApiException as error:
            if error.status != GONE:
                raise

    def pods(self, selector: str) -> PodList:
        """Pods with the labels of a selector."""
        found = self._json(
            self._api.list_namespaced_pod(self.namespace, label_selector=selector, **_options())
        )
        return PodList(found["items"], found["metadata"]["resourceVersion"])

    def pod(self, name: str) -> dict[str, Any] | None:
        """One pod, or None; a list of one, so that no right to `get` is needed."""
        found = self._json(
            self._api.list_namespaced_pod(
                self.namespace, field_selector=f"metadata.name={name}", **_options()
            )
        )
        return next(iter(found["items"]), None)

    def watch_pods(
        self, selector: str, version: str, seconds: int
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Changes of pods as they happen: ADDED, MODIFIED, DELETED or ERROR, and the object.

        Args:
            selector: Labels.
            version: Version of the list that is known.
            seconds: When the server ends the watch.
        """
        answer = self._api.list_namespaced_pod(
            self.namespace,
            label_selector=selector,
            resource_version=version,
            watch=True,
            timeout_seconds=seconds,
            _preload_content=False,
            _request_timeout=(_TIMEOUT_SECONDS, seconds + _TIMEOUT_SECONDS),
        )
        with answer:
            for line in _lines(answer):
                event = json.loads(line)
                yield event["type"], event["object"]

    def log(self, name: str, *, follow: bool, since_seconds: int | None) -> Iterator[bytes]:
        """Lines of a pod's log, each with its time in front; until the pod ends if followed."""
        options: dict[str, Any] = {}
        if since_seconds is not None:
            options["since_seconds"] = since_seconds
        answer = self._api.read_namespaced_pod_log(
            name,
            self.namespace,
            follow=follow,
            timestamps=True,
            _preload_content=False,
            _request_timeout=(_TIMEOUT_SECONDS, _SILENT_SECONDS if follow else _TIMEOUT_SECONDS),
            **options,
        )
        with answer:
            yield from _lines(answer)

    def events(self, pod: str) -> list[dict[str, Any]]:
        """Events of a pod, oldest first."""
        found = self._json(
            self._api.list_namespaced_event(
                self.namespace, field_selector=f"involvedObject.name={pod}", **_options()
            )
        )
        events: list[dict[str, Any]] = found["items"]
        return sorted(events, key=lambda each: each["metadata"]["creationTimestamp"] or "")

    def may(self, verb: str, resource: str) -> bool:
        """True where this account has a right in the namespace, ``pods/log`` for a part of pods."""
        name, _, part = resource.partition("/")
        wanted = {"namespace": self.namespace, "verb": verb, "resource": name, "subresource": part}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        answer = self._json(
            self._authorization.create_self_subject_access_review(review, **_options())
        )
        return bool(answer["status"]["allowed"])

    def own_pod(self) -> dict[str, Any] | None:
        """The pod of this process, where it is one in this namespace."""
        if not _SERVICE_ACCOUNT.exists() or _SERVICE_ACCOUNT.read_text() != self.namespace:
            return None
        # A pod's host name is its own name, unless its author chose another.
        return self.pod(os.environ.get("POD_NAME") or os.uname().nodename)

    @staticmethod
    def _json(answer: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(answer.data)
        return found


@contextlib.contextmanager
def explained(cluster: Cluster) -> Iterator[None]:
    """Turns what the API server refuses, or that it does not answer, into an error for a person."""
    try:
        yield
    except ApiException as error:
        message = f"the cluster {cluster.server} refuses: {reason_of(error)}"
        if error.status in (401, 403):
            raise UserError(message, RIGHTS_REMEDY) from error
        raise StageFailedError(message) from error
    except urllib3.exceptions.HTTPError as error:
        raise StageFailedError(
            f"the cluster {cluster.server} does not answer: {error}; look at KUBECONFIG and "
            "execution.kubernetes.context where it never did"
        ) from error


def reason_of(error: ApiException) -> str:
    """The API server's own words for a request that it refused."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason or error)


def _configuration(settings: KubernetesSettings) -> tuple[client.Configuration, str]:
    made = client.Configuration()
    chosen = settings.kubeconfig or settings.context
    file = os.environ.get("KUBECONFIG")
    if settings.kubeconfig is not None:
        file = str(Path(settings.kubeconfig).expanduser())
    try:
        if chosen is None and file is None and _SERVICE_ACCOUNT.exists():
            config.load_incluster_config(client_configuration=made)
            return made, settings.namespace or _SERVICE_ACCOUNT.read_text()
        config.load_kube_config(file, settings.context, client_configuration=made)
        listed, current = config.list_kube_config_contexts(file)
    except (ConfigException, OSError, yaml.YAMLError) as error:
        raise UserError(
            f"no cluster is configured: {error}",
            "set KUBECONFIG or execution.kubernetes.kubeconfig to its file, and "
            "execution.kubernetes.context to one of the file's contexts",
        ) from error
    contexts = {each["name"]: each for each in listed}
    context = contexts.get(settings.context, current)["context"]
    return made, settings.namespace or context.get("namespace") or "default"


def _options() -> dict[str, Any]:
    return {"_preload_content": False, "_request_timeout": _TIMEOUT_SECONDS}


def _lines(answer: Any) -> Iterator[bytes]:
    unread = b""
    for data in answer.stream(amt=None, decode_content=False):
        *lines, unread = (unread + data).split(b"\n")
        yield from lines
    if unread:
        yield unread


RIGHTS = (
    ("pods", "create"),
    ("pods", "list"),
    ("pods", "watch"),
    ("pods", "delete"),
    ("pods/log", "get"),
    ("events", "list"),
)
"""Resources and verbs, none of which is asked for without being used."""


def missing_rights(cluster: Cluster) -> list[str]:
    """Rights that this account lacks, as ``verb resource``."""
    return [f"{verb} {what}" for what, verb in RIGHTS if not cluster.may(verb, what)]


def check_rights(cluster: Cluster) -> None:
    """Refuses a cluster before the first stage where a right is missing.

    Raises:
        UserError: It names what is missing.
    """
    missing = missing_rights(cluster)
    if missing:
        raise UserError(
            f"in namespace {cluster.namespace!r} of {cluster.server} this account may not "
            f"{', '.join(missing)}",
            RIGHTS_REMEDY,
        )
