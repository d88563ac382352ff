"""Command ``geb bandit``: the toy experiment of the paper."""

from typing import Annotated

import typer

from flows.commands.common import AsJson, Out, answer, watched
from stages.contract.atomic import write_atomically


def bandit(
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions.")] = 10,
    iterations: Annotated[
        int, typer.Option(min=50, metavar="N", help="Updates of each policy, in steps of 50.")
    ] = 5000,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run the paper's toy experiment: does a bonus find the best arm of a bandit?"""
    from experiments.bandit import GAMES, Game, Outcome, figure, simulate, table
    from flows.report.plots import png

    outcomes: dict[Game, Outcome] = {}
    with watched(as_json).status("") as status:
        for game in GAMES:
            status.update(f"{len(outcomes)} of {len(GAMES)} games")
            outcomes[game] = simulate(game, seeds, iterations)
    result = table(outcomes)
    if out is not None:
        write_atomically(out / "table.md", f"{result.markdown()}\n")
        write_atomically(out / "policies.png", png(figure(outcomes)))
    answer(as_json, {"cells": result.records()}, result)
