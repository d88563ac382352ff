"""Budget of the paper's cells: steps that several runs share are counted once."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.study import (
    Row,
    choose,
    finished,
    identities,
    mean_rewards,
    reported_runs,
    tuning_runs,
)
from flows.execution.plan import plan
from flows.pipeline.algorithm import resolve_run, unread_steps
from flows.pipeline.external import HubUnreachableError
from flows.pipeline.presets import store_of
from flows.planning.estimate import Rates, StepEstimate, estimate, measured_rates
from flows.planning.show import count, duration
from stages.store.opening import open_store


def budget(
    rows: Sequence[Row],
    overrides: Mapping[str, Any],
    most_seeds: int | None = None,
    parallel_runs: int = 1,
) -> dict[str, Any]:
    """Estimates the runs of cells; a coefficient without a finished tuning run is its first value.

    Arguments are as in :func:`experiments.study.tuning_runs`; parallel runs share the time
    evenly.

    Returns:
        Values for a JSON document: the runs, and tokens, time and GPU-hours of what the store
        lacks.
    """
    tuned = finished(tuning_runs(rows, overrides))
    first = {row: row.coefficients()[0] for row in rows if row.grid}
    chosen = {**first, **choose(tuned, mean_rewards(tuned))}
    runs = tuning_runs(rows, overrides, most_seeds)
    runs += reported_runs(rows, overrides, chosen, most_seeds)
    configs = list({run.name: run.cell.config for run in runs}.values())
    different: dict[str, StepEstimate] = {}
    hub_asked = True
    num_steps = 0
    rates: Rates | None = None
    for config in configs:
        try:
            planned = plan(resolve_run(config)) if hub_asked else []
        except HubUnreachableError:
            # That takes a while to find out: once is enough.
            hub_asked = False
            planned = []
        steps = unread_steps(config)
        # All cells have one store.
        rates = measured_rates(open_store(config.store)) if rates is None else rates
        costs = estimate(config, steps, planned, rates).steps
        different |= zip(identities(steps), costs, strict=True)
        num_steps += len(steps)
    todo = [each for each in different.values() if not each.cached]
    return {
        "store": store_of(overrides),
        "runs": [config.name for config in configs],
        "steps": num_steps,
        "different_steps": len(different),
        "steps_to_compute": len(todo),
        "tokens": sum(each.work.tokens for each in todo),
        "seconds": sum(each.seconds or 0.0 for each in todo) / parallel_runs,
        "gpu_hours": sum(each.gpu_hours for each in todo),
        "hub_asked": hub_asked,
        "warnings": list(dict.fromkeys(said for each in todo for said in each.warnings)),
    }


def budget_lines(found: Mapping[str, Any]) -> list[str]:
    """A budget in a few lines."""
    hours = f", {found['gpu_hours']:.3g} GPU-hours" if found["gpu_hours"] else ""
    lines = [
        f"{len(found['runs'])} runs: {found['steps']} steps, {found['different_steps']} of them "
        f"different, {found['different_steps'] - found['steps_to_compute']} in the store",
        f"budget: {count(found['tokens'])} tokens, about {duration(found['seconds'])}{hours}",
    ]
    if not found["hub_asked"]:
        lines.append("the hub does not answer: what the store has of runs that need it is unknown")
    return lines + [f"warning: {each}" for each in found["warnings"]]
