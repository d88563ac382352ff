"""The image for a request: chosen by stage, and refused when it holds other code than is here."""

import contextlib
from typing import Any

import docker
from docker.errors import ImageNotFound

from flows.pipeline.placement import DockerSettings
from flows.runners.images import CODE_LABEL, image_tags
from stages.contract.errors import UserError
from stages.contract.manifest import stages_digest
from stages.contract.request import Request


def find_image(
    client: docker.DockerClient, settings: DockerSettings, request: Request
) -> tuple[Any, str]:
    """The image for a request, and its name with its digest.

    Settings may name images by tag, with a digest (``TAG@sha256:…``), or by their id.

    Raises:
        UserError: It is not there, or was built from other code than the orchestrator runs.
    """
    tags = image_tags(request.image, gpus=request.resources.gpus)
    target = f"{request.image}-gpu" if tags[0].endswith("-gpu") else request.image
    command = f"docker/build.sh {target}"
    chosen = settings.images.get(request.stage)
    names = [chosen] if chosen else tags
    for name in names:
        with contextlib.suppress(ImageNotFound):
            image = client.images.get(name)
            if image.labels.get(CODE_LABEL) != stages_digest():
                raise UserError(
                    f"image {name} holds other code of the stages than the orchestrator",
                    f"build it again, or on top of an image that is up to date: `{command}`",
                )
            # A registry's digest of the content, else the engine's own.
            digests = image.attrs.get("RepoDigests") or [f"@{image.id}"]
            return image, f"{name.partition('@')[0]}@{digests[0].partition('@')[2]}"
    raise UserError(
        f"no image {names[0]} for stage {request.stage!r}",
        f"build it: `{command}`, or correct execution.docker.images",
    )
