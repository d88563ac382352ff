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

from flows.images.table import ROOT, Image
from stages.contract.digests import sha256_of
from stages.contract.errors import GebError, UserError

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


BUILD_LOCK = "constraints/build.lock"
"""pip and the build backend of this project."""
CUDA_LOCK = "constraints/cuda.lock"
"""PyTorch as PyPI has it, and what it brings for NVIDIA's GPUs."""
# PyTorch's builds for the CPU are on no index that all machines reach, or are a machine's own.
_NO_HASH = re.compile(r"torch==[\d.]+\+cpu")


def plain_name(name: str) -> str:
    """Name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """Entries of a lock by ``name==version``, each with its hashes as pip reads them."""
    entries: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", path.read_text()):
        if match := re.match(r"([\w.-]+)==([^\s;\\]+)", entry):
            entries[f"{plain_name(match[1])}=={match[2]}"] = entry.rstrip()
    return entries


def resolve(image: Image, requirements: list[str], options: list[str]) -> list[str]:
    """Packages that pip would install for requirements, as ``name==version``.

    Raises:
        UserError: There is no such set of packages, or none can be had.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"),
                *("--quiet", "--report", report.name, *options, *requirements),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise no_wheelhouse(image, done.stderr.splitlines())
        found = json.loads(Path(report.name).read_text())["install"]
    pins = [f"{plain_name(one['metadata']['name'])}=={one['metadata']['version']}" for one in found]
    return sorted(pin for pin in pins if pin.partition("==")[0] not in image.leave_out)


def with_hashes(image: Image, pins: list[str]) -> tuple[list[str], list[str]]:
    """Splits packages into those with hashes, as entries of a lock, and the builds without any.

    Raises:
        UserError: A package is in no lock of the image.
    """
    lock = Path(image.constraints).with_suffix(".lock")
    entries = read_lock(ROOT / CUDA_LOCK) | read_lock(ROOT / lock)
    without = [pin for pin in pins if _NO_HASH.fullmatch(pin)]
    if unknown := [pin for pin in pins if pin not in entries and pin not in without]:
        raise UserError(
            f"image {image.title}: {lock} has no hashes for {', '.join(unknown)}",
            f"pin them in {image.constraints}, then `make lock`",
        )
    return [entries[pin] for pin in pins if pin in entries], without


def no_wheelhouse(image: Image, lines: list[str]) -> UserError:
    """The error for packages that pip does not bring."""
    # A refused hash is told in the lines after its ERROR.
    first = next((n for n, line in enumerate(lines) if line.startswith("ERROR")), -3)
    told = [line.strip() for line in lines[first:] if line.strip() and "WARNING" not in line]
    if "DO NOT MATCH THE HASHES" in " ".join(told):
        return UserError(
            f"no wheelhouse for image {image.title}: " + " ".join(told),
            "the file is not the one that was released: find out who changed it; where the "
            "release is yours, `make lock` takes its hashes",
        )
    return UserError(
        f"no wheelhouse for image {image.title}: " + "; ".join(told),
        "pip uses this machine's settings (`pip config list`); CPU builds of torch may need "
        "an index of their own: --index URL",
    )
