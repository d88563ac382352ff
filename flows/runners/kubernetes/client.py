"""Requests of the runner to a cluster: pods, logs and events of one namespace.

Answers are plain dictionaries, as the API has them: the client's models take a multiple of the
time, and refuse what their version of the API did not know. The client checks a pod by its model.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from http.client import NOT_FOUND, UNAUTHORIZED
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from pydantic import ValidationError

from flows.pipeline.placement import KubernetesSettings
from flows.runners.attempt_log import whole_lines
from flows.runners.kubernetes.diagnosis import STAGE, Pod, refused
from flows.runners.place import PlaceAwayError
from stages.contract.errors import StageFailedError, UserError

UNREACHABLE = (urllib3.exceptions.HTTPError, OSError)
"""Errors of an API server that does not answer."""
_RIGHTS_REMEDY = (
    "give the orchestrator's account the role: `kubectl apply -k configs/cluster/kubernetes`"
)
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# A proxy, which does not reach the server, or a server that is starting.
_AWAY_STATUSES = (502, 503, 504)
_TIMEOUT_SECONDS = 60.0
_LAST_EVENTS = 5
# A node that does not answer must not keep the others waiting.
_LOG_SECONDS = 20.0


class Cluster:
    """Requests to one namespace of a cluster. Safe to use from several threads.

    Raises:
        UserError: No cluster is configured, or its configuration lacks the context.
    """

    def __init__(self, settings: KubernetesSettings) -> None:
        configuration, self.namespace = _configuration(settings)
        # One connection for each stage.
        configuration.connection_pool_maxsize = 64
        configuration.retries = False
        self.server = str(configuration.host)
        self._api = client.CoreV1Api(client.ApiClient(configuration))

    def create(self, manifest: Pod, num_pods: int, *, dry_run: bool = False) -> None:
        """Creates a pod of ``num_pods`` that are alike.

        A dry run lets the API server check and admit it without creating it.

        Raises:
            UserError: The cluster refuses it, for a reason that a person has to change.
            StageFailedError: It refuses it for now, or does not answer a dry run.
            NoRoomError: The namespace's quota has no room for it now.
        """
        mode = "All" if dry_run else None
        try:
            _asked(self._api.create_namespaced_pod, self.namespace, manifest, dry_run=mode)
        except ValidationError as error:
            raise UserError(
                f"no pod is like this: {error}",
                "correct execution.kubernetes; a value such as true or 1 may need quotes",
            ) from error
        except ApiException as error:
            for_all = [UNAUTHORIZED] if dry_run else [UNAUTHORIZED, *_AWAY_STATUSES]
            if error.status in for_all or "cannot create resource" in reason_of(error):
                raise
            stage = manifest["metadata"]["labels"][STAGE]
            raise refused(error.status, reason_of(error), stage, num_pods) from error

    def delete_pod(self, name: str, grace_seconds: int | None = None) -> None:
        """Asks a pod to end; nothing happens if there is none.

        A grace period of 0 forgets the pod at once, whether its node answers or not; None takes its
        own.
        """
        request = self._api.delete_namespaced_pod
        try:
            _asked(request, name, self.namespace, grace_period_seconds=grace_seconds)
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise

    def pods(self, selector: str) -> list[Pod]:
        """Pods with the labels of a selector."""
        answer = _asked(self._api.list_namespaced_pod, self.namespace, label_selector=selector)
        return list(answer["items"])

    def log(self, name: str, since_seconds: int) -> list[str]:
        """Lines of a pod's log from the last seconds, each with its time in front."""
        answer = self._api.read_namespaced_pod_log(
            name,
            self.namespace,
            timestamps=True,
            _preload_content=False,
            _request_timeout=_LOG_SECONDS,
            since_seconds=since_seconds,
        )
        return list(whole_lines([answer.data]))

    def last_events(self, pod: str) -> str:
        """The last events of a pod, in the cluster's words."""
        selector = f"involvedObject.name={pod}"
        answer = _asked(self._api.list_namespaced_event, self.namespace, field_selector=selector)
        events = sorted(answer["items"], key=lambda event: event["metadata"]["creationTimestamp"])
        last = events[-_LAST_EVENTS:]
        words = [f"{event.get('reason')}: {event.get('message')}" for event in last]
        return "; ".join(words) or "no events"


@contextlib.contextmanager
def explain_api_errors(cluster: Cluster) -> Iterator[None]:
    """Turns what the API server refuses, or that it does not answer, into an error for a person."""
    try:
        yield
    except ApiException as error:
        message = f"the cluster {cluster.server} refuses: {reason_of(error)}"
        if error.status in (401, 403):
            raise UserError(message, _RIGHTS_REMEDY) from error
        if error.status in _AWAY_STATUSES:
            raise PlaceAwayError(message) from error
        raise StageFailedError(message) from error
    except urllib3.exceptions.HTTPError as error:
        raise PlaceAwayError(
            f"the cluster {cluster.server} does not answer: {error}; look at KUBECONFIG "
            "where it never did"
        ) from error


def reason_of(error: ApiException) -> str:
    """The API server's own words for a request that it refused."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason or error)


def _configuration(settings: KubernetesSettings) -> tuple[client.Configuration, str]:
    configuration = client.Configuration()
    file = os.environ.get("KUBECONFIG")
    try:
        if file is None and _SERVICE_ACCOUNT.exists():
            config.load_incluster_config(client_configuration=configuration)
            return configuration, settings.namespace or _SERVICE_ACCOUNT.read_text()
        config.load_kube_config(file, client_configuration=configuration)
        _, current = config.list_kube_config_contexts(file)
    except (ConfigException, OSError, yaml.YAMLError) as error:
        raise UserError(
            f"no cluster is configured: {error}",
            "set KUBECONFIG to its file, whose current context is used",
        ) from error
    namespace = settings.namespace or current["context"].get("namespace")
    return configuration, namespace or "default"


def _asked(request: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """The object that a request of the API answers with, as it is.

    Raises:
        DecodeError: The answer is not JSON: a proxy's page, of which the server knows nothing.
    """
    options |= {"_preload_content": False, "_request_timeout": _TIMEOUT_SECONDS}
    text = request(*arguments, **options).data
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise urllib3.exceptions.DecodeError(f"its answer is not JSON ({error})") from error
    return answer
