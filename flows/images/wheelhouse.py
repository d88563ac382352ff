"""Wheelhouses: all packages of an image as wheels, downloaded or built on the host.

The host's pip knows the way to an index (mirrors, certificates, credentials), so that neither the
Dockerfile nor the image has to.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import docker
from docker.errors import ImageNotFound

from flows.images.locks import BUILD_LOCK, CUDA_LOCK, no_wheelhouse, resolve, with_hashes
from flows.images.table import ROOT, Image
from stages.contract.digests import sha256_of
from stages.contract.errors import GebError

CACHE = ROOT / ".cache" / "wheelhouse"
_STAMP = "wheelhouse.json"
_CHUNK_BYTES = 1 << 20
Say = Callable[[str], None]


def requirements_of(image: Image) -> list[str]:
    """Requirements of an image in ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in image.extras:
        wanted += project["optional-dependencies"][extra]
    return [_of_flavour(each, image) for each in wanted]


def _of_flavour(requirement: str, image: Image) -> str:
    """Makes a pinned torch one of the image's flavour: CPU builds have a local version."""
    if not re.fullmatch(r"torch==[\d.]+", requirement) or image.flavour is None:
        return requirement
    cpu_build = requirement.partition("==")[2] + "+cpu"
    return f"torch=={cpu_build}" if image.flavour == "cpu" else f"{requirement},!={cpu_build}"


def ensure_wheelhouse(image: Image, index: str | None, say: Say) -> Path:
    """Makes the wheelhouse of an image, or finds it made already; one call at a time.

    Args:
        image: The image.
        index: A further package index, such as one with CPU builds of torch.
        say: Takes the lines of what happens.

    Returns:
        A folder of wheels; ``build/`` in it holds those that build this project's own package.

    Raises:
        UserError: A package cannot be had.
    """
    folder = CACHE / image.title
    requirements = requirements_of(image)
    lock = Path(image.constraints).with_suffix(".lock")
    made_of = {
        "requirements": requirements,
        "constraints": (ROOT / image.constraints).read_text(),
        "locks": [(ROOT / each).read_text() for each in (lock, CUDA_LOCK, BUILD_LOCK)],
        "leave_out": image.leave_out,
        "python": sys.version_info[:2],
    }
    stamp = sha256_of(json.loads(json.dumps(made_of)))
    if (folder / _STAMP).exists() and (folder / _STAMP).read_text() == stamp:
        return folder
    say(f"wheelhouse {folder}: {len(requirements)} requirements pinned by {image.constraints}")
    CACHE.mkdir(parents=True, exist_ok=True)
    for left in CACHE.glob(f".{image.title}-*"):
        # Of a build that was killed: gigabytes, which nobody else would remove.
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".{image.title}-") as scratch:
        made = Path(scratch) / "wheels"
        options = ["--extra-index-url", index] if index else []
        pins = resolve(
            image, requirements, ["--constraint", str(ROOT / image.constraints), *options]
        )
        hashed, without = with_hashes(image, pins)
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text("\n".join(hashed) + "\n")
        _pip_wheel(made, ["--require-hashes", "--requirement", str(wanted)], image, say)
        if without:
            say(f"without a hash: {', '.join(without)}")
            _pip_wheel(made, [*options, *without], image, say)
        build = ["--require-hashes", "--requirement", str(ROOT / BUILD_LOCK)]
        _pip_wheel(made / "build", build, image, say)
        (made / _STAMP).write_text(stamp)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder


def _pip_wheel(folder: Path, arguments: list[str], image: Image, say: Say) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--progress-bar", "off", "--no-deps"]
    with subprocess.Popen(
        [*command, "--wheel-dir", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as pip:
        assert pip.stdout is not None
        lines = []
        for line in pip.stdout:
            lines.append(line.rstrip())
            say(lines[-1])
    if pip.returncode:
        raise no_wheelhouse(image, lines)


def _require_imported(tag: str, said: str) -> None:
    """Looks through the engine's answer, which begins before the import may fail."""
    for line in filter(None, said.splitlines()):
        if error := json.loads(line).get("error"):
            raise GebError(f"the wheels cannot be imported as {tag}: {error}")


def ensure_wheel_image(client: docker.DockerClient, folder: Path, say: Say) -> str:
    """Brings a wheelhouse into the engine as an image without anything else and returns its tag.

    Dockerfiles copy from it. A build that changes code alone then sends a few kilobytes.

    Raises:
        GebError: The engine does not take it, for want of room for example.
    """
    wheels = sorted(folder.rglob("*.whl"))
    content = [[each.relative_to(folder).as_posix(), each.stat().st_size] for each in wheels]
    repository, version = f"geb-wheels-{folder.name}", sha256_of(content)[:12]
    tag = f"{repository}:{version}"
    try:
        client.images.get(tag)
    except ImageNotFound:
        total = sum(each.stat().st_size for each in wheels)
        say(f"importing {len(wheels)} wheels, {total / 2**20:.0f} MiB, as {tag}")
        with tempfile.TemporaryFile(dir=folder.parent) as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for each in wheels:
                    archive.add(each, each.relative_to(folder).as_posix())
            file.seek(0)
            chunks = iter(lambda: file.read(_CHUNK_BYTES), b"")
            said = client.api.import_image_from_stream(chunks, repository=repository, tag=version)
            _require_imported(tag, said)
        for old in client.images.list(repository):
            if tag not in old.tags:
                client.images.remove(str(old.id), force=True)
    return tag
