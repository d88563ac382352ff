"""Packages by their hashes: a file that a lock does not name gets into no image.

``constraints/NAME.lock`` lists the packages of ``constraints/NAME.txt`` with the SHA-256 of every
file of their releases (``make lock``).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from flows.images.table import ROOT, Image
from stages.contract.errors import UserError

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
