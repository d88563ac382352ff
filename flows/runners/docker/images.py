"""The image for a request: chosen by stage, and refused when it holds other code than is here."""

import contextlib
from typing import Any

import docker
from docker.errors import ImageNotFound

from flows.pipeline.placement import DockerSettings
from flows.runners.images import (
    CODE_LABEL,
    REVISION_LABEL,
    VERSION_LABEL,
    build_command,
    geb_version,
    image_tags,
)
from stages.contract.errors import UserError
from stages.contract.manifest import stages_digest
from stages.contract.request import Request


class Images:
    """The images of a run's stages, each looked up by its name once.

    A name that is given to another image while the run is under way changes nothing in it. Settings
    may name images by tag or with a digest (``TAG@sha256:…``).
    """

    def __init__(self, settings: DockerSettings) -> None:
        self._settings = settings
        self._ids: dict[str, str] = {}

    def find(self, client: docker.DockerClient, request: Request) -> tuple[Any, str]:
        """The image for a request, and its name with its digest.

        Raises:
            UserError: It is not there, is not the one of the digest, or was built from other code
                than the orchestrator runs.
        """
        chosen = self._settings.images.get(request.stage)
        tags = image_tags(request.image, gpus=request.resources.gpus)
        command = build_command(tags[0])
        for name in [chosen] if chosen else tags:
            image = self._look_up(client, name, request.stage)
            if image is not None:
                labels = image.attrs["Config"]["Labels"] or {}
                _check(name, labels, chosen is not None, command)
                self._ids[name] = image.id
                return image, f"{name.partition('@')[0]}@{_digests(image)[0]}"
        if chosen:
            raise UserError(
                f"no image {chosen} for stage {request.stage!r} (execution.docker.images)",
                "build or pull it, or correct the name",
            )
        raise UserError(f"no image {tags[0]} for stage {request.stage!r}", f"build it: `{command}`")

    def _look_up(self, client: docker.DockerClient, name: str, stage: str) -> Any:
        if name in self._ids:
            try:
                return client.images.get(self._ids[name])
            except ImageNotFound as error:
                raise UserError(
                    f"image {name} was {self._ids[name]} when the run came to need it, and is gone",
                    "resume the run: it goes on with the image that has the name now",
                ) from error
        tag, _, digest = name.partition("@")
        # The engine knows digests of what it pulled or pushed; one that was built here has its id.
        for reference in (name, tag) if digest else (tag,):
            with contextlib.suppress(ImageNotFound):
                found = client.images.get(reference)
                break
        else:
            return None
        if digest and digest not in _digests(found):
            raise UserError(
                f"image {tag} is {_digests(found)[0]}, not {digest}, which "
                f"execution.docker.images.{stage} names: it was built again or tampered with",
                "find out which; then name a digest that you trust (docs/containers.md#by-digest)",
            )
        return found


def _digests(image: Any) -> list[str]:
    """Digests of an image's content, a registry's before the engine's own."""
    of_registries = [each.partition("@")[2] for each in image.attrs.get("RepoDigests") or ()]
    return [*of_registries, str(image.id)]


def _check(tag: str, labels: dict[str, str], is_custom: bool, command: str) -> None:
    build = f"build it again: `{command}`"
    if is_custom:
        build = f"build it again on top of an image that is up to date: `{command}`"
    if CODE_LABEL not in labels:
        raise UserError(
            f"image {tag} has no label {CODE_LABEL}: it does not say which stages it holds",
            f"build it on top of an image of this project: `{command}`",
        )
    version = labels.get(VERSION_LABEL)
    here = geb_version()
    if version != here:
        raise UserError(f"image {tag} holds geb {version}, the orchestrator is geb {here}", build)
    if labels[CODE_LABEL] != stages_digest():
        raise UserError(
            f"image {tag} holds other code of the stages than the orchestrator: it was built at "
            f"revision {labels.get(REVISION_LABEL)}",
            build,
        )
