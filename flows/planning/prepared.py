"""Prompts that `prepare` makes: of artifacts where they are there, else as configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flows.pipeline.config import RunConfig
from flows.pipeline.step import Step
from flows.planning import sizes
from flows.planning.sizes import Table
from stages.contract.store import Artifact

_TEST = "test.parquet"


@dataclass(frozen=True)
class Prepared:
    """Prompts of one step of `prepare`.

    Attributes:
        tables: Those of a run by their files; of a suite one, by the step.
        prompt_tokens: Mean length of a run's prompt; None of a suite.
        notes: Reasons why something could not be estimated.
    """

    tables: Mapping[str, Table]
    prompt_tokens: float | None = None
    notes: tuple[str, ...] = ()


def prepared(config: RunConfig, step: Step, made: Artifact | None) -> Prepared:
    """Prompts of a step.

    Args:
        config: The run's configuration.
        step: The step, of the run or of a suite.
        made: Its artifact, where the store has it.
    """
    if "train" not in step.inputs:
        return _of_suite(step, made)
    data = sizes.rows_of(step.inputs["train"])
    tokens = sizes.prompt_tokens(config, data)
    names = [f"iteration-{iteration}.parquet" for iteration in range(1, config.iterations + 1)]
    if made is not None:
        counted = {name: Table(sizes.made_rows(made, name)) for name in (*names, _TEST)}
        return Prepared(counted, tokens)
    number = sizes.train_prompts(config, data)
    own = sizes.rows_of(step.inputs.get("test", ()))
    tables = dict.fromkeys(names, Table(number or 0))
    tables[_TEST] = Table(sizes.held_out_prompts(config, own))
    unknown = (
        "the number of prompts is not known before `prepare` has read them: set "
        "estimation.prompts_per_iteration (or prepare.prompts_per_iteration)"
    )
    return Prepared(tables, tokens, () if number is not None else (unknown,))


def _of_suite(step: Step, made: Artifact | None) -> Prepared:
    """Prompts of a suite; their length is taken for that of the run's."""
    if made is not None:
        return Prepared({step.name: Table(sizes.made_rows(made, _TEST))})
    data = sizes.rows_of(step.inputs["test"])
    if data is not None:
        return Prepared({step.name: Table(data.number)})
    unread = f"the prompts of {step.name} are not on this machine: its suite is not estimated"
    return Prepared({step.name: Table(0)}, notes=(unread,))
