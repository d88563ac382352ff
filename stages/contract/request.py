"""Request to a stage, and the key under which its artifact is kept."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from stages.contract.digests import sha256_of
from stages.contract.params import ImageName, StageParams
from stages.contract.records import Record


class ArtifactInput(Record):
    """A whole artifact of the store, or one file or folder of it."""

    kind: Literal["artifact"] = "artifact"
    stage: str
    key: str
    path: str = ""
    """File or folder inside the artifact; empty for all of it."""
    digest: str
    """Digest of what ``path`` names, telemetry left out."""


class FileInput(Record):
    """A file or folder outside the store, addressed by its content."""

    kind: Literal["file"] = "file"
    location: str
    digest: str
    state: str | None = None
    """Sizes and times of modification (:func:`stages.contract.digests.state_of`) as the digest was
    taken, if known: a large input is hashed again only if they differ. Not part of the key."""


class HubInput(Record):
    """A model or data set of the Hugging Face hub at a resolved revision (a commit)."""

    # Manifests of earlier versions list its digest, too.
    model_config = ConfigDict(extra="ignore")

    kind: Literal["hub"] = "hub"
    repo: str
    revision: str
    repo_type: Literal["model", "dataset"] = "model"

    @property
    def digest(self) -> str:
        """Identity that enters keys."""
        return f"hub:{self.repo_type}:{self.repo}@{self.revision}"


Input = Annotated[ArtifactInput | FileInput | HubInput, Field(discriminator="kind")]


class Resources(Record):
    """Resources of a stage's program. None of them enters the key."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    gpus: int = Field(0, ge=0)
    """GPUs on each node; 0 runs on the CPU."""
    processes: int = Field(1, ge=1)
    """Worker processes of each node if there is no GPU; with GPUs, one process each."""
    nodes: int = Field(1, ge=1)
    """Machines that train together; the others run `python -m stages.training.node WORK`."""
    cpus: float | None = Field(None, gt=0)
    """CPU cores (threads, in the process runner); unset leaves the choice to the runner."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory limit in GiB, if the runner can enforce one."""
    timeout_seconds: float | None = Field(None, gt=0)
    """Wall-clock limit of one attempt, from the start of its supervisor, which enforces it."""

    @property
    def devices(self) -> int:
        """GPUs of a node, or its processes on a CPU."""
        return self.gpus or self.processes

    @property
    def world_size(self) -> int:
        """Processes that train together, on all nodes."""
        return self.nodes * self.devices


class Call(Record):
    """Parameters, seed, inputs and key of one computation, and the run that asks for it."""

    format: Literal[1] = 1
    stage: str
    version: str
    params: dict[str, Any]
    seed: int
    inputs: dict[str, tuple[Input, ...]]
    key: str
    run: str = ""
    """Name of the run that asks; a label, not part of the key."""
    step: str = ""
    """Place in that run (``iteration-2/train``); a label, not part of the key."""

    def sources(self) -> Iterator[Input]:
        """Its inputs, without their names."""
        return (source for group in self.inputs.values() for source in group)


class Request(Call):
    """One call of a stage: ``python -m stages.<stage> REQUEST.json``."""

    store: str
    """Root of the store as the stage's program sees it."""
    resources: Resources = Resources()
    image: ImageName
    """Container image that the stage needs; not part of the key."""
    writes_registry: bool
    """True for a stage that writes into the model registry; not part of the key."""

    @property
    def title(self) -> str:
        """Its step, or its stage if it belongs to no run; for messages and names."""
        return self.step or self.stage

    def write(self, path: Path) -> None:
        """Writes the request as JSON."""
        path.write_text(self.model_dump_json(indent=2), encoding="utf-8")


def key_fields(params: StageParams, seed: int, inputs: Mapping[str, Sequence[Any]]) -> dict:
    """Fields whose digest is the key: everything that can change the result of a stage."""
    return {
        "stage": params.stage,
        "version": params.version,
        "params": params.result_fields(),
        "seed": seed,
        "inputs": {name: [source.digest for source in group] for name, group in inputs.items()},
    }


def make_request(
    params: StageParams,
    *,
    inputs: Mapping[str, Sequence[Any]],
    seed: int,
    store: str,
    run: str = "",
    step: str = "",
    resources: Resources | None = None,
) -> Request:
    """Builds the request for one stage and computes its key; a `Step` has checked the inputs."""
    from_hub = any(isinstance(source, HubInput) for group in inputs.values() for source in group)
    return Request(
        stage=params.stage,
        version=params.version,
        params=params.model_dump(mode="json"),
        seed=seed,
        inputs={name: tuple(group) for name, group in inputs.items()},
        key=sha256_of(key_fields(params, seed, inputs)),
        store=store,
        run=run,
        step=step,
        resources=resources or Resources(),
        image=params.image_for(from_hub=from_hub),
        writes_registry=params.writes_registry,
    )
