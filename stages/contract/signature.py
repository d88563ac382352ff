"""Inputs and outputs that a stage declares, and the checks of a request and an artifact by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from stages.contract.errors import GebError, UserError

Kind = Literal[
    "artifact",
    "model",
    "file",
    "metrics",
    "prompts",
    "responses",
    "scores",
    "pairs",
    "distributions",
]
"""Whole artifacts; models (checkpoints, adapters, repositories of the hub); metrics of evaluations;
tables by the names of their schemas in ``stages.contract.tables``; other files and folders."""

ImageName = Literal["core", "torch", "vllm", "eval"]
"""Container image by what it holds: nothing beyond the contract's packages, torch, vLLM, or the
code of lm-eval and AlpacaEval."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a stage.

    Attributes:
        kind: Kind of what is read.
        optional: Whether a request may leave it out.
        many: Whether a request may give several, read in their order.
    """

    kind: Kind
    optional: bool = False
    many: bool = False

    def __str__(self) -> str:
        notes = [self.kind, *["optional"] * self.optional, *["several"] * self.many]
        return ", ".join(notes)


@dataclass(frozen=True)
class OutputSpec:
    """One file or folder of a stage's artifact.

    Attributes:
        kind: Kind of what is written.
        optional: Whether some artifacts of the stage are without it.
    """

    kind: Kind
    optional: bool = False


def check_inputs(
    stage: str, specs: Mapping[str, InputSpec], given: Mapping[str, Sequence[Kind | None]]
) -> None:
    """Compares the inputs of a request with those that its stage declares.

    Args:
        stage: Name of the stage.
        specs: Declared inputs by name.
        given: Kinds of what is given by the inputs' names; None where a kind cannot be known.

    Raises:
        UserError: An input is missing, unknown, given too often, or of another kind.
    """
    known = "; ".join(f"{name} ({spec})" for name, spec in specs.items()) or "none"
    remedy = f"inputs of {stage}: {known}"
    for name, kinds in given.items():
        if name not in specs:
            raise UserError(f"stage {stage!r} has no input {name!r}", remedy)
        if len(kinds) > 1 and not specs[name].many:
            raise UserError(
                f"stage {stage!r} reads one {name!r}, and is given {len(kinds)}", remedy
            )
        for kind in kinds:
            if kind not in (None, specs[name].kind):
                raise UserError(
                    f"stage {stage!r} reads {name!r} as {specs[name].kind}, and is given {kind}",
                    remedy,
                )
    for name, spec in specs.items():
        if not spec.optional and not given.get(name):
            raise UserError(f"stage {stage!r} lacks its input {name!r}", remedy)


def find_output(stage: str, specs: Mapping[str, OutputSpec], path: str) -> OutputSpec:
    """The declared output that a path inside an artifact belongs to.

    Raises:
        UserError: There is none.
    """
    for pattern, spec in specs.items():
        if fnmatchcase(path, pattern):
            return spec
    raise UserError(
        f"stage {stage!r} has no output {path!r}", f"outputs of {stage}: {', '.join(specs)}"
    )


def check_outputs(stage: str, specs: Mapping[str, OutputSpec], files: Iterable[str]) -> None:
    """Checks that every declared output is among the files that a stage has written.

    Raises:
        GebError: One is missing.
    """
    # `checkpoint/config.json` stands for `checkpoint`, too.
    written = {part for file in files for part in _with_folders(file)}
    for pattern, spec in specs.items():
        if not spec.optional and not any(fnmatchcase(path, pattern) for path in written):
            raise GebError(
                f"stage {stage!r} ended without its output {pattern!r}; it wrote "
                f"{', '.join(sorted(written)) or 'nothing'}"
            )


def _with_folders(file: str) -> Iterable[str]:
    parts = file.split("/")
    return ("/".join(parts[: end + 1]) for end in range(len(parts)))
