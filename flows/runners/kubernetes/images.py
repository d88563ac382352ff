"""Images of pods: the one for a request, and its digest once a node has fetched it."""

from __future__ import annotations

import threading

from flows.images.table import images_named
from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.kubernetes.diagnosis import image_id_of
from flows.runners.kubernetes.labels import Pod
from stages.contract.request import Request

# Registry and folder that a name without any stands for.
_DEFAULT_REGISTRY = "docker.io/library/"
# Before what a node says of an image that Docker fetched.
_OF_DOCKER = "docker-pullable://"


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
        """Takes the digest from a pod of the request that has started."""
        name = image_of(request, self._settings)
        pinned = with_digest(name, image_id_of(pod))
        if pinned is not None:
            with self._lock:
                self._pinned.setdefault(name, pinned)


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
    repository, _, digest = image_id.removeprefix(_OF_DOCKER).partition("@")
    if "@" in name or not digest:
        return None
    return f"{name}@{digest}" if _repository(name) == _repository(repository) else None


def _repository(name: str) -> str:
    """Name of an image without tag, with its registry."""
    folder, slash, last = name.rpartition("/")
    repository = folder + slash + last.partition(":")[0]
    return repository if slash else _DEFAULT_REGISTRY + repository
