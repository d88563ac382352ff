"""Cells of the bandit experiment: methods, divergences and κ that go together."""

from __future__ import annotations

from dataclasses import dataclass

from stages.bandit.params import BanditParams
from stages.objectives import DESIGNS
from stages.objectives.divergences import resolve_divergence


@dataclass(frozen=True)
class Cell:
    """One method under one divergence with one κ."""

    method: str
    divergence: str
    kappa: float


def cells(params: BanditParams) -> list[Cell]:
    """Every combination that is defined, grouped by divergence, then method; f-DPO has no κ."""
    return [
        Cell(method, divergence, kappa)
        for divergence in params.divergences
        for method in params.methods
        if DESIGNS[method].refuses(resolve_divergence(divergence)) is None
        for kappa in ((0.0,) if method == "none" else params.kappas)
    ]
