"""The image for a request: chosen by stage, and refused when it holds other code than is here."""

import contextlib
from typing import Any

import docker
from docker.errors import ImageNotFound

from flows.pipeline.placement import DockerSettings
from flows.runners.images import CODE_LABEL, REVISION_LABEL, build_command, image_tags
from stages.contract.errors import UserError
from stages.contract.manifest import stages_digest
from stages.contract.request import Request


def find_image(
    client: docker.DockerClient, settings: DockerSettings, request: Request
) -> tuple[Any, str]:
    """The image for a request, and its name with its digest.

    Settings may name images by tag or with a digest (``TAG@sha256:…``).

    Raises:
        UserError: It is not there, is not the one of the digest, or was built from other code than
            the orchestrator runs.
    """
    chosen = settings.images.get(request.stage)
    tags = image_tags(request.image, gpus=request.resources.gpus)
    command = build_command(tags[0])
    names = [chosen] if chosen else tags
    for name in names:
        image = _look_up(client, name, request.stage)
        if image is None:
            continue
        labels = image.attrs["Config"]["Labels"] or {}
        if labels.get(CODE_LABEL) != stages_digest():
            raise UserError(
                f"image {name} holds other code of the stages than the orchestrator (revision "
                f"{labels.get(REVISION_LABEL)})",
                f"build it again, or on top of an image that is up to date: `{command}`",
            )
        return image, f"{name.partition('@')[0]}@{_digests(image)[0]}"
    raise UserError(
        f"no image {names[0]} for stage {request.stage!r}",
        f"build it: `{command}`, or correct execution.docker.images",
    )


def _look_up(client: docker.DockerClient, name: str, stage: str) -> Any:
    tag, _, digest = name.partition("@")
    # The engine knows digests of what it pulled or pushed; one that was built here has its id.
    for reference in (name, tag):
        with contextlib.suppress(ImageNotFound):
            image = client.images.get(reference)
            if digest and digest not in _digests(image):
                raise UserError(
                    f"image {tag} is {_digests(image)[0]}, not {digest}, which "
                    f"execution.docker.images.{stage} names: it was built again or tampered with",
                    "find out which; then name a digest that you trust "
                    "(docs/clusters.md#pin-an-image)",
                )
            return image
    return None


def _digests(image: Any) -> list[str]:
    """Digests of an image's content, a registry's before the engine's own."""
    of_registries = [each.partition("@")[2] for each in image.attrs.get("RepoDigests") or ()]
    return [*of_registries, str(image.id)]
