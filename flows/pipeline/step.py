"""A call of a stage within a run, with its inputs named by the steps that make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.contract.errors import located
from stages.contract.params import StageParams, check_inputs, check_output
from stages.contract.request import Input


@dataclass(frozen=True)
class Output:
    """An artifact that a step will make, or one file or folder of it.

    Attributes:
        params: Parameters' type of its stage, which declares its outputs.
        path: File or folder inside the artifact; empty for all of it.
    """

    step: str
    params: type[StageParams]
    path: str = ""

    def at(self, path: str) -> Output:
        """One file or folder of the artifact; UserError if the stage declares no such output."""
        check_output(self.params.stage, self.params.outputs, path)
        return Output(self.step, self.params, path)


Source = Output | Input
Sources = Mapping[str, Sequence[Source]]
"""Inputs of a step, by name."""


@dataclass(frozen=True)
class Step:
    """One call of a stage within a run.

    Raises:
        UserError: The stage declares other inputs.

    Attributes:
        name: Place in the run, ``iteration-2/train``.
        inputs: Outputs of earlier steps, and what comes from outside.
        after: Names of steps that must have ended well first, although this one reads nothing of
            theirs: both write to the registry, in this order.
    """

    name: str
    params: StageParams
    inputs: Sources
    seed: int = 0
    after: Sequence[str] = ()

    def __post_init__(self) -> None:
        with located(self.name):
            check_inputs(self.stage, self.params.inputs, self.inputs)

    @property
    def output(self) -> Output:
        """The artifact that the step will make."""
        return Output(self.name, type(self.params))

    @property
    def stage(self) -> str:
        """Name of the stage."""
        return self.params.stage

    def upstream(self) -> list[str]:
        """Names of the steps whose artifacts this one reads."""
        sources = [source for group in self.inputs.values() for source in group]
        return list(dict.fromkeys(source.step for source in sources if isinstance(source, Output)))


def step_name(iteration: int, part: str, suite: str = "") -> str:
    """Name of a step of an iteration, or of a group: ``iteration-2/evaluate/suite-math``."""
    return suite_step_name(f"iteration-{iteration}/{part}", suite)


def suite_step_name(name: str, suite: str) -> str:
    """Name of a suite's steps within a group; the run's own without a suite."""
    return f"{name}/suite-{suite}" if suite else name
