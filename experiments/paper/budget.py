"""Budget of the paper's cells: steps that several runs share are counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.paper.values import BANDIT
from experiments.study import Row, StudyRun, by_name, reported_runs, tuning_runs
from flows.execution.plan import PlannedStep, plan
from flows.pipeline.algorithm import unread_steps
from flows.pipeline.config import RunConfig
from flows.pipeline.external import HubUnreachableError
from flows.pipeline.presets import store_of
from flows.pipeline.step import Output, Step
from flows.planning.estimate import StepEstimate, estimate
from flows.planning.show import count, duration, size
from stages.contract.digests import sha256_of
from stages.contract.request import key_fields


@dataclass(frozen=True)
class _Identity:
    """Stands for the content of an output that is not there yet."""

    digest: str


@dataclass(frozen=True)
class SharedStep:
    """A step's cost once, and the names of the runs that ask for it."""

    cost: StepEstimate
    runs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Budget:
    """Cost of cells.

    Attributes:
        steps: Steps by an identity that equal steps of all runs share.
        of_run: Identities of each run's steps.
        cells: The cells in the order of their table, a record for each; those with a grid once for
            each value, and once for the runs that are reported, which count with the first value.
        num_cells: Their number.
        store: The store.
        hub_asked: False if the hub did not answer: runs with inputs from it then count as not
            computed.
    """

    steps: Mapping[str, SharedStep]
    of_run: Mapping[str, Sequence[str]]
    cells: Sequence[Mapping[str, Any]]
    num_cells: int
    store: str
    hub_asked: bool

    def to_json(self, parallel_runs: int) -> dict[str, Any]:
        """Values for a JSON document; of tokens, time, GPU-hours and disk what the store lacks.

        Args:
            parallel_runs: Runs at the same time, which share the time evenly.
        """
        todo = [each.cost for each in self.steps.values() if not each.cost.cached]
        warnings = [warning for each in todo for warning in each.warnings]
        return {
            "store": self.store,
            "runs": len(self.of_run),
            "steps": sum(len(each) for each in self.of_run.values()),
            "different_steps": len(self.steps),
            "steps_to_compute": len(todo),
            "tokens": sum(each.cost.tokens for each in todo),
            "seconds": sum(each.cost.seconds or 0.0 for each in todo) / parallel_runs,
            "gpu_hours": sum(each.gpu_hours for each in todo),
            "disk": sum(each.cost.disk for each in todo),
            "hub_asked": self.hub_asked,
            "warnings": list(dict.fromkeys(warnings)),
            "cells": [dict(each) for each in self.cells],
        }

    def lines(self, parallel_runs: int) -> list[str]:
        """The budget in a few lines."""
        found = self.to_json(parallel_runs)
        hours = f", {found['gpu_hours']:.3g} GPU-hours" if found["gpu_hours"] else ""
        lines = [
            f"{found['runs']} runs of {self.num_cells} cells: {found['steps']} steps, "
            f"{found['different_steps']} of them different, "
            f"{found['different_steps'] - found['steps_to_compute']} in the store",
            f"budget: {count(found['tokens'])} tokens, about {duration(found['seconds'])} with "
            f"{parallel_runs} at a time, {size(found['disk'])} on disk{hours}",
        ]
        if not self.hub_asked:
            lines.append(
                "the hub does not answer: what the store has of runs with inputs from it is unknown"
            )
        return lines + [f"warning: {each}" for each in found["warnings"]]


def budget(
    rows: Sequence[Row], overrides: Mapping[str, Any], most_seeds: int | None = None
) -> Budget:
    """Estimates the runs of cells; coefficients that are not chosen yet count as their first value.

    Args:
        rows: The cells.
        overrides: Sections and fields laid over every configuration.
        most_seeds: Seeds of each cell to keep, the first ones; all if None.

    Raises:
        UserError: A configuration is wrong.
    """
    own = [row for row in rows if row.experiment != BANDIT]
    first = {row: row.coefficients()[0] for row in own if row.grid}
    runs = [
        *tuning_runs(own, overrides, most_seeds),
        *reported_runs(own, overrides, first, most_seeds),
    ]
    configs = [each.cell.config for each in by_name(runs).values()]
    steps, of_run, hub_asked = _steps_of(configs)
    groups: dict[tuple[Row, bool, str], list[StudyRun]] = {}
    for each in runs:
        groups.setdefault((each.row, each.tunes, str(each.coefficient)), []).append(each)
    cells = [(row, _cell(row, [], steps, of_run)) for row in rows if row.experiment == BANDIT]
    cells += [(row, _cell(row, group, steps, of_run)) for (row, *_), group in groups.items()]
    cells.sort(key=lambda pair: rows.index(pair[0]))
    store = configs[0].store if configs else store_of(overrides)
    return Budget(
        steps, of_run, [cell for _, cell in cells], len({row for row, _ in cells}), store, hub_asked
    )


def _cell(
    row: Row,
    runs: Sequence[StudyRun],
    steps: Mapping[str, SharedStep],
    of_run: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Cost of one cell under one value of its coefficient; tokens with those of shared steps."""
    tunes = bool(runs and runs[0].tunes)
    fields = {**row.fields, **(runs[0].coefficient if runs else {})}
    if runs and row.grid and not tunes:
        fields |= dict.fromkeys(row.grid, "chosen")
    own = [steps[name] for each in runs for name in of_run[each.name]]
    return {
        "experiment": row.experiment,
        "setting": row.setting,
        "method": row.method,
        "divergence": row.divergence,
        "configuration": row.configuration,
        "fields": ", ".join(f"{name}={value}" for name, value in fields.items()),
        "seeds": [each.cell.config.seed for each in runs],
        "tunes": tunes,
        "runs": [each.name for each in runs],
        "tokens": sum(each.cost.cost.tokens for each in own),
        "steps": len(own),
        "shared": sum(len(each.runs) > 1 for each in own),
        "cached": sum(each.cost.cached for each in own),
    }


def _steps_of(
    configs: Iterable[RunConfig],
) -> tuple[dict[str, SharedStep], dict[str, Sequence[str]], bool]:
    """Steps by identity, identities by run, and whether the hub answered."""
    steps: dict[str, SharedStep] = {}
    of_run: dict[str, Sequence[str]] = {}
    hub_answers = True
    for config in configs:
        own = unread_steps(config)
        planned = None
        if hub_answers:
            try:
                planned = plan(config)
            except HubUnreachableError:
                # That takes a while to find out: once is enough.
                hub_answers = False
        lines = planned or [PlannedStep(each.name, each.stage, "run", "", None) for each in own]
        costs = {each.step: each for each in estimate(config, lines, own).steps}
        identities = _identities(own)
        of_run[config.name] = list(identities.values())
        for step, identity in identities.items():
            steps.setdefault(identity, SharedStep(costs[step])).runs.append(config.name)
    return steps, of_run, hub_answers


def _identities(steps: Sequence[Step]) -> dict[str, str]:
    """An identity for each step by its name: what its key would be, were its inputs there."""
    found: dict[str, str] = {}
    for step in steps:
        inputs = {
            name: [
                _Identity(f"{found[each.step]}/{each.path}") if isinstance(each, Output) else each
                for each in group
            ]
            for name, group in step.inputs.items()
        }
        found[step.name] = sha256_of(key_fields(step.params, step.seed, inputs))
    return found
