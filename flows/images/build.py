"""Builds container images by `docker build`, from wheels that the host downloads.

The host's pip knows the way to an index (mirrors, certificates, credentials), so that neither the
Dockerfile nor the image has to.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound
from requests.exceptions import RequestException

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
from stages.contract.digests import sha256_file, sha256_of
from stages.contract.errors import GebError, UserError
from stages.contract.manifest import stages_digest
from stages.store.locks import exclusive_lock
from stages.store.opening import cache_home

CACHE = ROOT / ".cache" / "wheelhouse"
PYTHON = ".".join(map(str, sys.version_info[:2]))
DEFAULT_BASE = f"python:{PYTHON}-slim"
_DOCKERFILE = "docker/stage.Dockerfile"
_PACKAGES = ("stages", "flows", "experiments")
_STAMP = "wheelhouse.json"
# PyTorch as PyPI has it, and what it brings for NVIDIA's GPUs.
_CUDA_LOCK = "constraints/cuda.lock"
# PyTorch's builds for the CPU are on no index that all machines reach, or are a machine's own.
_NO_HASH = re.compile(r"torch-[\d.]+\+cpu-")
Say = Callable[[str], None]


def build(
    client: docker.DockerClient, image: Image, base: str, index: str | None, uid: int, say: Say
) -> int:
    """Builds one image and returns its bytes.

    Wheels may come from a further package ``index``, such as one with CPU builds of torch. ``uid``
    is the user and group id of what runs in the image.

    Raises:
        UserError: The code runs outside a checkout, or pip or Docker cannot fetch packages or the
                base image.
        GebError: The build failed.
    """
    if not (ROOT / _DOCKERFILE).exists():
        raise UserError(f"{ROOT} has no {_DOCKERFILE}", "build images in a checkout of the project")
    # Another build of the image would remove its wheels; the engine is no checkout's.
    with exclusive_lock(cache_home() / "images" / f"{image.title}.lock"):
        wheels = _ensure_wheel_image(client, ensure_wheelhouse(image, index, say), say)
        if find_image(client, base) is None:
            _pull(base)
        arguments = {
            "BASE": base,
            "WHEELS": wheels,
            "PYTHON_VERSION": PYTHON,
            "VERSION": geb_version(),
            "LEFT_OUT": " ".join(each for each in _PACKAGES if each not in image.code),
            "PACKAGES": " ".join(image.debian),
            # vLLM has a function of its sampler compiled even if `enforce_eager` is set.
            "TORCHDYNAMO_DISABLE": "" if "gcc" in image.debian else "1",
            "UID": str(uid),
            "GID": str(uid),
        }
        labels = {
            TITLE_LABEL: f"geb {image.title}",
            VERSION_LABEL: geb_version(),
            REVISION_LABEL: git_revision(),
            CODE_LABEL: stages_digest(),
            "org.opencontainers.image.licenses": "Apache-2.0",
        }
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        options += [f"--label={name}={value}" for name, value in labels.items()]
        _docker("build", f"--tag={image.tag}", f"--file={ROOT / _DOCKERFILE}", *options, str(ROOT))
        # What had the tag before; it stays if a container still uses it.
        of_it = f"{TITLE_LABEL}={labels[TITLE_LABEL]}"
        client.images.prune({"dangling": True, "label": of_it})
    return int(client.images.get(image.tag).attrs["Size"])


def ensure_wheelhouse(image: Image, index: str | None, say: Say) -> Path:
    """A folder with all packages of an image as wheels; it is made once for the same pins.

    Raises:
        UserError: A package cannot be had, or no lock of the image has the hash of its file.
    """
    folder = CACHE / image.title
    requirements = _requirements(image)
    locks = [(ROOT / each).read_text() for each in (image.lock, _CUDA_LOCK)]
    pins = (ROOT / image.constraints).read_text()
    stamp = sha256_of([requirements, pins, locks, image.leave_out, PYTHON])
    if (folder / _STAMP).exists() and (folder / _STAMP).read_text() == stamp:
        return folder
    say(f"wheelhouse {folder}: {len(requirements)} requirements pinned by {image.constraints}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = ["--extra-index-url", index] if index else []
    options += ["--constraint", str(ROOT / image.constraints)]
    _pip(image, ["download", "--dest", str(folder), *options, *requirements])
    known = set(re.findall(r"sha256:(\w+)", "".join(locks)))
    for file in sorted(folder.iterdir()):
        if file.name.partition("-")[0] in image.leave_out:
            file.unlink()
        elif _NO_HASH.match(file.name):
            say(f"without a hash: {file.name}")
        elif sha256_file(file) not in known:
            raise UserError(
                f"image {image.title}: {file.name} has a hash that is not in {image.lock}",
                "`make lock` if its pin is new; otherwise the file is not the one that was "
                "released: find out who changed it",
            )
        elif file.suffix != ".whl":
            _pip(image, ["wheel", "--no-deps", "--wheel-dir", str(folder), str(file)])
    (folder / _STAMP).write_text(stamp)
    return folder


def _requirements(image: Image) -> list[str]:
    """Requirements of an image in ``pyproject.toml``; a pinned torch is of the image's flavour."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    # In pods that share no folder with the orchestrator, stages reach the bucket themselves.
    for extra in dict.fromkeys((*image.extras, "bucket")):
        wanted += project["optional-dependencies"][extra]
    # CPU builds have a local version.
    flavour = {"cpu": r"\g<0>+cpu", "gpu": r"\g<0>,!=\g<1>+cpu", None: r"\g<0>"}[image.flavour]
    return [re.sub(r"^torch==([\d.]+)$", flavour, each) for each in wanted]


def _pip(image: Image, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "WARNING" not in line]
        raise UserError(
            f"no wheelhouse for image {image.title}: " + " ".join(filter(None, lines)),
            "pip uses this machine's settings (`pip config list`); CPU builds of torch may need "
            "an index of their own: --index URL",
        )


def _ensure_wheel_image(client: docker.DockerClient, folder: Path, say: Say) -> str:
    """Brings a wheelhouse into the engine as an image without anything else and returns its tag.

    Dockerfiles copy from it. A build that changes code alone then sends a few kilobytes.
    """
    repository = f"geb-wheels-{folder.name}"
    tag = f"{repository}:{(folder / _STAMP).read_text()[:12]}"
    if find_image(client, tag) is None:
        say(f"importing the wheels as {tag}")
        (folder / "Dockerfile").write_text("FROM scratch\nCOPY *.whl /\n")
        _docker("build", f"--tag={tag}", str(folder))
    for old in client.images.list(repository):
        if tag not in old.tags:
            client.images.remove(str(old.id), force=True)
    return tag


def _pull(base: str) -> None:
    try:
        _docker("pull", base)
    except GebError as error:
        raise UserError(
            f"no base image {base}: {error}",
            "name one with --base or GEB_BASE_IMAGE; `sudo docker/make-base.sh` makes one where "
            "no registry is reachable",
        ) from error


def _docker(*arguments: str) -> None:
    """Runs Docker's command line; a person sees what it says."""
    try:
        code = subprocess.run(["docker", *arguments], check=False).returncode
    except FileNotFoundError as error:
        raise UserError(
            "there is no command `docker`", "install Docker's command line: it builds the images"
        ) from error
    if code:
        raise GebError(
            f"`docker {arguments[0]}` has ended with exit code {code} and says why above"
        )


def find_image(client: docker.DockerClient, name: str) -> Any:
    """The engine's image of a name; None if there is none."""
    try:
        return client.images.get(name)
    except ImageNotFound:
        return None


@contextmanager
def engine_errors_explained() -> Iterator[None]:
    """Turns errors of the engine's client into a GebError: it refuses, fails, or is away."""
    try:
        yield
    except (DockerException, RequestException) as error:
        said = getattr(error, "explanation", None) or error
        raise GebError(f"the Docker engine fails: {said}") from error
