"""Budget of the paper's cells: steps that several runs share are counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.paper.values import BANDIT
from experiments.study import KINDS, Row, StudyRun, by_name, reported_runs, tuning_runs
from flows.execution.plan import PlannedStep, plan
from flows.pipeline.algorithm import unread_steps
from flows.pipeline.config import RunConfig
from flows.pipeline.external import HubUnreachableError
from flows.pipeline.presets import store_of
from flows.pipeline.step import Output, Step
from flows.planning.estimate import StepEstimate, estimate
from flows.planning.show import count, duration
from stages.contract.digests import sha256_of
from stages.contract.request import key_fields


@dataclass(frozen=True)
class _Identity:
    """Stands for the content of an output that is not there yet."""

    digest: str


def budget(
    rows: Sequence[Row],
    overrides: Mapping[str, Any],
    most_seeds: int | None = None,
    parallel_runs: int = 1,
) -> dict[str, Any]:
    """Estimates the runs of cells; coefficients that are not chosen yet count as their first value.

    Args:
        rows: The cells.
        overrides: Sections and fields laid over every configuration.
        most_seeds: Seeds of each cell to keep, the first ones; all if None.
        parallel_runs: Runs at the same time, which share the time evenly.

    Returns:
        Values for a JSON document: tokens, time, GPU-hours and disk of what the store lacks, and a
        record for each cell; cells with a grid once for each value, and once for the reported runs.

    Raises:
        UserError: A configuration is wrong.
    """
    own = [row for row in rows if row.experiment != BANDIT]
    first = {row: row.coefficients()[0] for row in own if row.grid}
    runs = [
        *tuning_runs(own, overrides, most_seeds),
        *reported_runs(own, overrides, first, most_seeds),
    ]
    groups: dict[tuple[Row, bool, str], list[StudyRun]] = {}
    for each in runs:
        groups.setdefault((each.row, each.tunes, str(each.coefficient)), []).append(each)
    cells = [(row, _cell(row, [])) for row in rows if row.experiment == BANDIT]
    cells += [(row, _cell(row, group)) for (row, *_), group in groups.items()]
    cells.sort(key=lambda pair: rows.index(pair[0]))
    configs = [each.cell.config for each in by_name(runs).values()]
    costs, hub_asked = _costs(configs)
    different = {identity: cost for own in costs for identity, cost in own.items()}
    todo = [each for each in different.values() if not each.cached]
    return {
        "store": configs[0].store if configs else store_of(overrides),
        "runs": len(configs),
        "steps": sum(map(len, costs)),
        "different_steps": len(different),
        "steps_to_compute": len(todo),
        "tokens": sum(each.cost.tokens for each in todo),
        "seconds": sum(each.cost.seconds or 0.0 for each in todo) / parallel_runs,
        "gpu_hours": sum(each.gpu_hours for each in todo),
        "hub_asked": hub_asked,
        "warnings": list(dict.fromkeys(said for each in todo for said in each.warnings)),
        "cells": [cell for _, cell in cells],
    }


def budget_lines(found: Mapping[str, Any]) -> list[str]:
    """A budget in a few lines."""
    hours = f", {found['gpu_hours']:.3g} GPU-hours" if found["gpu_hours"] else ""
    lines = [
        f"{found['runs']} runs: {found['steps']} steps, {found['different_steps']} of them "
        f"different, {found['different_steps'] - found['steps_to_compute']} in the store",
        f"budget: {count(found['tokens'])} tokens, about {duration(found['seconds'])}{hours}",
    ]
    if not found["hub_asked"]:
        lines.append(
            "the hub does not answer: what the store has of runs with inputs from it is unknown"
        )
    return lines + [f"warning: {each}" for each in found["warnings"]]


def _cell(row: Row, runs: Sequence[StudyRun]) -> dict[str, Any]:
    tunes = bool(runs and runs[0].tunes)
    fields = {**row.fields, **(runs[0].coefficient if runs else {})}
    if runs and row.grid and not tunes:
        fields |= dict.fromkeys(row.grid, "chosen")
    return {
        **dict(zip(KINDS, row.names(), strict=True)),
        "configuration": row.configuration,
        "fields": ", ".join(f"{name}={value}" for name, value in fields.items()),
        "seeds": [each.cell.config.seed for each in runs],
        "tunes": tunes,
        "runs": [each.name for each in runs],
    }


def _costs(configs: Sequence[RunConfig]) -> tuple[list[dict[str, StepEstimate]], bool]:
    """Costs of each run's steps by their identities; False if the hub did not answer."""
    costs: list[dict[str, StepEstimate]] = []
    hub_answers = True
    for config in configs:
        own = unread_steps(config)
        lines = [PlannedStep(each.name, each.stage, "run", "", None) for each in own]
        if hub_answers:
            try:
                lines = plan(config)
            except HubUnreachableError:
                # That takes a while to find out: once is enough.
                hub_answers = False
        names = _identities(own)
        estimated = estimate(config, lines, own).steps
        costs.append({names[each.step]: each for each in estimated})
    return costs, hub_answers


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
