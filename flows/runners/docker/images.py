"""The image for a request: chosen by stage, and refused when it holds other code than is here."""

from __future__ import annotations

from typing import Any

import docker
from docker.errors import ImageNotFound

from flows.images.table import (
    CODE_LABEL,
    REVISION_LABEL,
    VERSION_LABEL,
    Image,
    geb_version,
    images_named,
)
from flows.pipeline.placement import DockerSettings
from stages.contract.code import stages_digest
from stages.contract.errors import UserError
from stages.contract.request import Request


def images_for(request: Request) -> list[Image]:
    """This project's images that can run a request, the best first."""
    return images_named(request.image, gpus=request.resources.gpus)


def find_image(client: docker.DockerClient, request: Request, settings: DockerSettings) -> Any:
    """The image for a request.

    Raises:
        UserError: It is not there, or was built from other code than the orchestrator runs.
    """
    chosen = settings.images.get(request.stage)
    candidates = images_for(request)
    for tag in [chosen] if chosen else [image.tag for image in candidates]:
        try:
            found = client.images.get(tag)
        except ImageNotFound:
            continue
        _check(tag, found.attrs["Config"]["Labels"] or {}, chosen is not None, candidates[0])
        return found
    if chosen:
        raise UserError(
            f"no image {chosen} for stage {request.stage!r} (execution.docker.images)",
            "build or pull it, or correct the name",
        )
    wanted = candidates[0]
    raise UserError(
        f"no image {wanted.tag} for stage {request.stage!r}", f"build it: `{_command(wanted)}`"
    )


def _command(image: Image) -> str:
    flavour = f" --flavour {image.flavour}" if image.flavour else ""
    return f"geb images build {image.name}{flavour}"


def _check(tag: str, labels: dict[str, str], own: bool, image: Image) -> None:
    build = f"build it again: `{_command(image)}`"
    if own:
        build = f"build it again on top of an image that is up to date: `{_command(image)}`"
    if CODE_LABEL not in labels:
        raise UserError(
            f"image {tag} has no label {CODE_LABEL}: it does not say which stages it holds",
            f"build it on top of an image of this project: `{_command(image)}`",
        )
    version, here = labels.get(VERSION_LABEL), geb_version()
    if version != here:
        raise UserError(f"image {tag} holds geb {version}, the orchestrator is geb {here}", build)
    if labels[CODE_LABEL] != stages_digest():
        raise UserError(
            f"image {tag} holds other code of the stages than the orchestrator: it was built at "
            f"revision {labels.get(REVISION_LABEL)}",
            build,
        )
