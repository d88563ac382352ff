"""Health of a cluster: rights, and for each image a pod that tells what it sees from its node."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from kubernetes.client.exceptions import ApiException
from pydantic import ValidationError

from flows.pipeline.config import RunConfig, StageResources
from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.health import Finding, faults_of, one_line, trial_request
from flows.runners.kubernetes.attempt import PodAttempt
from flows.runners.kubernetes.client import Cluster, explained, missing_rights, reason_of
from flows.runners.kubernetes.diagnosis import refused
from flows.runners.kubernetes.images import image_of
from flows.runners.kubernetes.labels import selector
from flows.runners.kubernetes.manifest import Attempt, attempt_name, trial_pod
from flows.runners.kubernetes.runner import user_of
from flows.runners.kubernetes.watch import PodWatch
from flows.runners.outcome import Ending
from stages.contract.errors import GebError
from stages.contract.health import Health
from stages.contract.request import Request
from stages.contract.stores import cache_home, location_of

_GRACE_SECONDS = 5.0


def findings(config: RunConfig) -> Iterator[Finding]:
    """Looks at the cluster of a configuration; starts a pod for each image."""
    settings = config.execution.kubernetes
    try:
        cluster = Cluster(settings)
        with explained(cluster):
            missing = missing_rights(cluster)
    except GebError as error:
        yield Finding("cluster", False, one_line(error))
        return
    yield Finding("cluster", True, f"{cluster.server}, namespace {cluster.namespace}")
    yield Finding("rights", not missing, f"may not {', '.join(missing)}" if missing else "all")
    if missing:
        return
    for name, request in _requests(config).items():
        yield _try_image(cluster, settings, name, request)


def _requests(config: RunConfig) -> dict[str, Request]:
    """A request by image: that of the stage which asks for the most GPUs."""
    store = str(cache_home()) if "://" in config.store else location_of(config.store)
    found: dict[str, Request] = {}
    for stage in StageResources.model_fields:
        resources = getattr(config.resources, stage)
        request = trial_request(
            stage,
            resources.model_copy(update={"nodes": 1}),
            key="0" * 64,
            store=store,
            run=config.name,
            step=f"doctor/{stage}",
            image=getattr(config, stage).image_for(from_hub=False),
        )
        name = image_of(request, config.execution.kubernetes)
        if name not in found or found[name].resources.gpus < resources.gpus:
            found[name] = request
    return found


def _try_image(
    cluster: Cluster, settings: KubernetesSettings, image: str, request: Request
) -> Finding:
    name = f"image {image} ({request.stage})"
    trial = _Trial()
    try:
        ending = _run_trial(cluster, settings, image, request, trial)
    except GebError as error:
        return Finding(name, False, one_line(error))
    if trial.health is None:
        return Finding(name, False, _why_silent(ending))
    wrong = trial.faults(request)
    seen = f"sees the store as user {trial.health.user}, holds this code, {trial.health.gpus} GPUs"
    return Finding(name, not wrong, "; ".join(wrong) if wrong else seen)


class _Trial:
    """Words of a trial pod, and how far its clock was ahead."""

    def __init__(self) -> None:
        self.health: Health | None = None
        self._ahead_seconds = 0.0

    def hear(self, node: int, line: str) -> None:
        """Takes a line of the pod's log."""
        # Libraries may print something, too.
        with contextlib.suppress(ValidationError):
            self.health = Health.model_validate_json(line)
            self._ahead_seconds = self.health.time - time.time()

    def faults(self, request: Request) -> list[str]:
        """Faults of the pod's place; the pod has told something."""
        assert self.health is not None
        return list(
            faults_of(
                self.health,
                ahead_seconds=self._ahead_seconds,
                gpus=request.resources.gpus,
                other_code="build and push the image again",
            )
        )


def _run_trial(
    cluster: Cluster, settings: KubernetesSettings, image: str, request: Request, trial: _Trial
) -> Ending:
    """Runs ``stages.contract.health`` in a pod to its end."""
    uid, gid = user_of(settings)
    attempt = Attempt(
        name=attempt_name(request, uuid.uuid4().hex[:6]),
        image=image,
        uid=uid,
        gid=gid,
        request_path="",
        sign=Path(request.store),
        grace_seconds=_GRACE_SECONDS,
    )
    with explained(cluster):
        try:
            pod = cluster.create_pod(trial_pod(request, settings, attempt))
        except ApiException as error:
            raise refused(error.status, reason_of(error), request.step, request.stage) from error
        pods = PodAttempt(cluster, request, settings, _GRACE_SECONDS, [pod], lambda event: None)
        watch = PodWatch(cluster, selector(store=request.store))
        try:
            [ending] = pods.follow(watch, trial.hear, lambda: None, threading.Event())
        finally:
            pods.remove()
    return ending


def _why_silent(ending: Ending) -> str:
    if ending.kind == "exited":
        return "it holds no stages of this version: push it again"
    kind = ending.kind.replace("_", " ")
    return f"its pod ended before it told anything ({kind}): {ending.message}".rstrip(": ")
