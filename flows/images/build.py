"""Builds images through the Docker engine's API, and turns its errors into messages."""

from __future__ import annotations

import contextlib
import io
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from flows.images.table import (
    CODE_LABEL,
    REVISION_LABEL,
    ROOT,
    TITLE_LABEL,
    VERSION_LABEL,
    Image,
    geb_version,
    git_revision,
)
from flows.images.wheelhouse import Say, ensure_wheel_image, ensure_wheelhouse
from stages.contract.errors import GebError, UserError
from stages.contract.file_locks import exclusive_lock, is_held
from stages.contract.provenance import stages_digest
from stages.contract.stores import cache_home

_DOCKERFILE = "docker/stage.Dockerfile"
_ALWAYS = ("pyproject.toml", "README.md", "LICENSE")
PYTHON = ".".join(map(str, sys.version_info[:2]))
DEFAULT_BASE = f"python:{PYTHON}-slim"


@dataclass(frozen=True)
class Options:
    """Settings of a build beside the table of images.

    Attributes:
        base: Base image.
        index: A further package index for the wheelhouse.
        uid: User id of what runs in the image; also its group id.
    """

    base: str = DEFAULT_BASE
    index: str | None = None
    uid: int = 10001


@dataclass(frozen=True)
class Built:
    """An image that is there now."""

    tag: str
    bytes: int
    seconds: float


def build(client: docker.DockerClient, image: Image, options: Options, say: Say) -> Built:
    """Builds one image.

    Raises:
        UserError: This is no checkout, packages or the base image cannot be had, or the engine
            refuses what is asked of it.
        GebError: The build failed, or the engine did.
    """
    if not (ROOT / _DOCKERFILE).exists():
        raise UserError(f"{ROOT} has no {_DOCKERFILE}", "build images in a checkout of the project")
    begun = time.monotonic()
    with _alone(image, say), engine_errors_explained(f"image {image.tag}"):
        wheels = ensure_wheel_image(client, ensure_wheelhouse(image, options.index, say), say)
        _ensure_base(client, options.base, say)
        before = find_image(client, image.tag)
        _run_build(client, image, options, wheels, say)
        after = client.images.get(image.tag)
        if before is not None and before.id != after.id:
            # Where a container still uses it, it stays.
            with contextlib.suppress(APIError):
                client.images.remove(before.id)
    return Built(image.tag, int(after.attrs["Size"]), time.monotonic() - begun)


@contextmanager
def _alone(image: Image, say: Say) -> Iterator[None]:
    """Keeps two builds of one image apart: each removes the wheels of the one before.

    The lock is a person's and no checkout's, as the engine is.
    """
    place = cache_home() / "images" / f"{image.title}.lock"
    if is_held(place):
        say(f"another build of {image.title} is at work: waiting for its end")
    with exclusive_lock(place):
        yield


def _ensure_base(client: docker.DockerClient, base: str, say: Say) -> None:
    if find_image(client, base) is not None:
        return
    say(f"pulling {base}")
    try:
        client.images.pull(base)
    except APIError as error:
        raise UserError(
            f"no base image {base}: {error.explanation}",
            "name one with --base or GEB_BASE_IMAGE; `sudo docker/make-base.sh` makes one where "
            "no registry is reachable",
        ) from error


def _run_build(
    client: docker.DockerClient, image: Image, options: Options, wheels: str, say: Say
) -> None:
    lines = client.api.build(
        fileobj=_context(image),
        custom_context=True,
        dockerfile=_DOCKERFILE,
        tag=image.tag,
        buildargs={
            "BASE": options.base,
            "WHEELS": wheels,
            "PYTHON_VERSION": PYTHON,
            "PACKAGES": " ".join(image.debian),
            # vLLM has a function of its sampler compiled even where `enforce_eager` is set.
            "TORCHDYNAMO_DISABLE": "" if "gcc" in image.debian else "1",
            "UID": str(options.uid),
            "GID": str(options.uid),
        },
        labels={
            TITLE_LABEL: f"geb {image.title}",
            VERSION_LABEL: geb_version(),
            REVISION_LABEL: git_revision(),
            CODE_LABEL: stages_digest(),
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
        rm=True,
        forcerm=True,
        decode=True,
    )
    for line in lines:
        if text := str(line.get("stream", "")).rstrip():
            say(text)
        if error := line.get("error"):
            raise GebError(f"image {image.tag} cannot be built: {error}")


def _context(image: Image) -> io.BytesIO:
    """The build context: the Dockerfile and the code, nothing else of the checkout."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in (_DOCKERFILE, *_ALWAYS, *image.code):
            archive.add(ROOT / name, name, filter=_plain)
    file.seek(0)
    return file


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leaves out what Python made, and makes owners and modes those of no particular person."""
    if Path(entry.name).name == "__pycache__":
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def find_image(client: docker.DockerClient, name: str) -> Any:
    """The engine's image of a name; None where there is none."""
    try:
        return client.images.get(name)
    except ImageNotFound:
        return None


@contextmanager
def engine_errors_explained(doing: str) -> Iterator[None]:
    """Turns what the engine refuses, and an engine that is gone, into messages.

    Args:
        doing: Name of the request that the block makes, for messages.

    Raises:
        UserError: The engine refuses it.
        GebError: The engine fails, or does not answer any more.
    """
    try:
        yield
    except APIError as error:
        said = str(error.explanation or error).strip()
        if error.is_client_error():
            raise UserError(
                f"{doing}: the Docker engine refuses: {said}", "correct what it names"
            ) from error
        raise GebError(f"{doing}: the Docker engine fails: {said}") from error
    except DockerException as error:
        raise GebError(f"{doing}: {error}") from error
    except (RequestException, HTTPError) as error:
        raise GebError(
            f"{doing}: the Docker engine does not answer any more ({type(error).__name__}: {error})"
        ) from error
