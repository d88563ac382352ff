"""Context of a stage, the argument of its ``run`` function."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.contract.params import StageParams
from stages.contract.request import HubInput, Request
from stages.store.base import Store

P = TypeVar("P", bound=StageParams)


@dataclass(frozen=True)
class ModelSource:
    """Source of a model for ``from_pretrained``: a folder, or a hub id with its revision."""

    name_or_path: str
    """Folder or hub id of the checkpoint."""
    revision: str | None = None
    """Commit of the hub's repository."""


FoundInput = Path | HubInput
"""One input of a request: a file or folder, found and checked, or something of the hub."""


@dataclass
class StageContext(Generic[P]):
    """Parameters, inputs and outputs of one stage call."""

    request: Request
    """The call: its seed, from which ``stages.contract.digests.derive_seed`` derives others, its
    resources, and the run that asks."""
    params: P
    out: Path
    """Empty folder; what is written here becomes the artifact."""
    store: Store
    """The store, for the few stages whose work is in it (the model registry)."""
    events: Emitter
    """Progress, metrics and log lines, for the orchestrator."""
    inputs: Mapping[str, tuple[FoundInput, ...]]
    telemetry: set[str] = field(default_factory=set)
    """Output files that may differ between computations of the same result (timings): kept and
    checked, but not in digests."""

    @property
    def work(self) -> Path:
        """Folder that survives failed attempts at the same key, for checkpoints and chunks."""
        return self.store.work_path(self.request.stage, self.request.key)

    def path(self, name: str) -> Path:
        """The file or folder given as input ``name``, of which the request has one at the most.

        Raises:
            UserError: The request has no such input, or one of the hub.
        """
        (path,) = self.paths(name)
        return path

    def paths(self, name: str) -> list[Path]:
        """All files or folders given as input ``name``, in the request's order."""
        group = self.inputs.get(name, ())
        paths = [entry for entry in group if isinstance(entry, Path)]
        if not paths or len(paths) < len(group):
            raise UserError(
                f"the request has no local input {name!r}",
                f"inputs of this request: {', '.join(self.inputs) or 'none'}",
            )
        return paths

    def has(self, name: str) -> bool:
        """True if the request has an input ``name``."""
        return bool(self.inputs.get(name))

    def model(self, name: str) -> ModelSource:
        """Source of the model given as input ``name``; UserError if the input is missing."""
        group = self.inputs.get(name, ())
        if len(group) != 1:
            raise UserError(f"input {name!r} wants one model, the request has {len(group)}")
        [entry] = group
        if isinstance(entry, HubInput):
            return ModelSource(entry.repo, entry.revision)
        return ModelSource(str(entry))

    def write_json(self, name: str, value: Any) -> None:
        """Writes an output file that people read: indented JSON, NaN refused."""
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        (self.out / name).write_text(f"{text}\n")
