"""Images of pods: the one for a request, and its digest once a node has fetched it."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from flows.images.table import images_named
from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.kubernetes.diagnosis import image_id_of
from flows.runners.kubernetes.labels import Pod
from stages.contract.atomic import write_atomically
from stages.contract.provenance import IMAGE_FILE_VARIABLE
from stages.contract.request import Request

# Registry and folder that a name without any stands for.
_DEFAULT_REGISTRY = "docker.io/library/"
# Before what a node says of an image that Docker fetched, or built.
_OF_DOCKER = re.compile(r"^docker(-pullable)?://")


class Images:
    """The images of a run's stages, by digest once one of their pods has started.

    From then on a tag that is moved in the registry changes nothing in the run.

    Args:
        settings: Registry, and images of one's own.
    """

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings
        self._pinned: dict[str, str] = {}
        self._lock = threading.Lock()

    def find(self, request: Request) -> str:
        """The image for a request, with its digest where that is known."""
        name = image_of(request, self._settings)
        with self._lock:
            return self._pinned.get(name, name)

    def learn(self, request: Request, pod: Pod) -> None:
        """Takes the digest from a pod of the request that has started, and tells its stage."""
        name = image_of(request, self._settings)
        pinned = with_digest(name, image_id_of(pod))
        if pinned is not None:
            with self._lock:
                self._pinned.setdefault(name, pinned)
        _tell(pod, name)


def image_file(request_path: str) -> Path:
    """File in which a stage is told its image, beside its request file."""
    return Path(request_path).with_suffix(".image")


def _tell(pod: Pod, name: str) -> None:
    """Writes the image with its digest where the pod's stage looks for it, for its manifest."""
    variables = pod["spec"]["containers"][0].get("env") or ()
    path = next((each["value"] for each in variables if each["name"] == IMAGE_FILE_VARIABLE), None)
    digest = _OF_DOCKER.sub("", image_id_of(pod)).rpartition("@")[2]
    if path is not None and digest:
        write_atomically(Path(path), f"{name}@{digest}")
        # The stage may run as another user.
        Path(path).chmod(0o644)


def image_of(request: Request, settings: KubernetesSettings) -> str:
    """The image for a request by name: this project's own, or the one that is configured."""
    chosen = settings.pod_of(request.stage).image
    if chosen is not None:
        return chosen
    [image, *_] = images_named(request.image, gpus=request.resources.gpus)
    return f"{settings.registry.rstrip('/')}/{image.tag}" if settings.registry else image.tag


def with_digest(name: str, image_id: str) -> str | None:
    """The name of an image with the digest that a node tells.

    None where the name has one, and where the node has the image from no registry, so that no
    other node could fetch it by a digest.
    """
    repository, _, digest = _OF_DOCKER.sub("", image_id).partition("@")
    if "@" in name or not digest:
        return None
    return f"{name}@{digest}" if _repository(name) == _repository(repository) else None


def _repository(name: str) -> str:
    """Name of an image without tag, with its registry."""
    folder, slash, last = name.rpartition("/")
    repository = folder + slash + last.partition(":")[0]
    return repository if slash else _DEFAULT_REGISTRY + repository
