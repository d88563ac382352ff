"""Bandit: parameters in; metrics, a table and two figures out."""

from stages.bandit.params import BanditParams
from stages.bandit.report import draw, summarise, table
from stages.bandit.simulate import cells, make_landscape, simulate
from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.harness.context import StageContext
from stages.harness.program import Stage


def run(ctx: StageContext[BanditParams]) -> None:
    """Runs every method, divergence, κ and seed, and writes what came of it."""
    params = ctx.params
    every = cells(params)
    if not every:
        raise UserError(
            f"none of the methods {list(params.methods)} is defined under "
            f"{list(params.divergences)}",
            "add `reverse_kl` to the divergences, or a method that extends to the others",
        )
    landscape = make_landscape(params.landscape)
    ctx.events.info(f"{len(every)} cells, {params.num_seeds} seeds each")
    outcome = simulate(
        params,
        landscape,
        ctx.request.seed,
        lambda done: ctx.events.progress(done, params.num_iterations, "iterations"),
    )
    records = summarise(every, outcome, landscape)
    metrics = {
        "reference_reward": float(landscape.reference @ landscape.rewards),
        "reference_best_region_mass": float(landscape.reference[landscape.best_region].sum()),
        "num_seeds": params.num_seeds,
        "cells": records,
    }
    (ctx.out / "metrics.json").write_text(dump_json(metrics))
    (ctx.out / "table.md").write_text(table(records))
    draw(ctx.out, every, outcome, landscape)
    ctx.notes["cells"] = len(every)


STAGE = Stage(BanditParams, run)
