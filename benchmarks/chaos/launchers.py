"""Places where stages of a campaign's runs start: this machine, its Docker engine, two clusters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import ImageNotFound

from flows.runners.docker.container import connect
from flows.runners.images import CODE_LABEL, image_tags
from flows.runners.place import PlaceAwayError
from stages.contract.manifest import stages_digest
from stages.store.base import Store
from tests.kubernetes.cluster import Namespace, namespace, reachable_cluster
from tests.slurm.jobs import Slurm, jobs_of, slurm_launcher


class MissingError(Exception):
    """The place is not on this machine; the text says why."""


class Launcher:
    """Processes of this machine, or containers, which are its processes, too.

    Attributes:
        is_cluster: True if stages outlive their orchestrator until its sign of life expires. Nodes
            see no file system that is mounted after they have started.
    """

    is_cluster = False

    def settings(self, store: Path) -> dict[str, Any]:
        """Settings of a run's `execution` in addition to its runner."""
        return {}

    def left(self, store: Path) -> list[str]:
        """Jobs or pods at work for a store."""
        return []


class Jobs(Launcher):
    """Jobs of a Slurm cluster."""

    is_cluster = True

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm

    def settings(self, store: Path) -> dict[str, Any]:
        """See :class:`Launcher`."""
        return self._slurm.settings()

    def left(self, store: Path) -> list[str]:
        """See :class:`Launcher`."""
        return sorted(jobs_of(Store.in_folder(str(store))))


class Pods(Launcher):
    """Pods of a namespace that is one run's alone."""

    is_cluster = True

    def __init__(self, cluster: Namespace) -> None:
        self._cluster = cluster

    def settings(self, store: Path) -> dict[str, Any]:
        """See :class:`Launcher`."""
        settings = self._cluster.settings(store)
        return {"kubernetes": settings.model_dump(mode="json", exclude_defaults=True)}

    def left(self, store: Path) -> list[str]:
        """See :class:`Launcher`."""
        return [
            pod["metadata"]["name"]
            for pod in self._cluster.pods()
            if pod["status"]["phase"] in ("Pending", "Running")
        ]


class Launchers:
    """The launchers of a campaign; a cluster starts with the first run that wants it.

    Args:
        folder: Folder of the clusters' files.
        stack: Ends the clusters.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._lock = threading.Lock()
        self._slurm: Slurm | None = None
        self._has_pods = False

    @contextlib.contextmanager
    def launcher(self, runner: str) -> Iterator[Launcher]:
        """The launcher of one run.

        Raises:
            MissingError: This machine has no such place.
        """
        try:
            match runner:
                case "docker":
                    _check_docker()
                    yield Launcher()
                case "slurm":
                    with self._lock:
                        if self._slurm is None:
                            self._slurm = self._stack.enter_context(slurm_launcher())
                    yield Jobs(self._slurm)
                case "kubernetes":
                    with self._lock:
                        if not self._has_pods:
                            self._stack.enter_context(reachable_cluster(self._folder / "cluster"))
                            self._has_pods = True
                    with namespace() as cluster:
                        yield Pods(cluster)
                case _:
                    yield Launcher()
        except pytest.skip.Exception as error:
            raise MissingError(str(error)) from None


def _check_docker() -> None:
    """Raises MissingError without an engine that has a run's images, built of the code here."""
    try:
        with contextlib.closing(connect()) as client:
            for name in ("core", "torch"):
                tag = image_tags(name, gpus=0)[0]
                if not _is_up_to_date(client, tag):
                    raise MissingError(f"no image {tag} of the code that is here")
    except PlaceAwayError as error:
        raise MissingError(str(error)) from None


def _is_up_to_date(client: docker.DockerClient, tag: str) -> bool:
    try:
        labels = client.images.get(tag).labels
    except ImageNotFound:
        return False
    return bool(labels.get(CODE_LABEL) == stages_digest())
