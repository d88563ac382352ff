"""Differences of two runs on the held-out prompts that they share, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flows.pipeline.steps import suite_place
from flows.report.prompt_figures import PromptFigure, places, prompt_figures
from flows.report.solved import Solved
from flows.report.statistics import Estimate, holm, paired_difference
from flows.report.summary import Summary
from flows.report.table import Cell


@dataclass(frozen=True)
class Compared:
    """One figure of two runs after the same iteration.

    Attributes:
        iteration: The iteration.
        figure: Name of the figure, see :func:`flows.report.prompt_figures.prompt_figures`.
        prompts: Prompts that both runs have the figure of.
        first: Mean over them in the first run.
        second: Mean over them in the second run.
        difference: ``second − first``.
        low: Lower end of its 95 % interval, a bootstrap over prompts; None for one prompt.
        high: Upper end.
        p_value: Of a permutation test within prompts; None for one prompt.
        adjusted_p_value: The same by Holm, over all figures that were compared with it.
    """

    iteration: int
    figure: str
    prompts: int
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    p_value: float | None
    adjusted_p_value: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return asdict(self)

    def __str__(self) -> str:
        difference = Cell.of(Estimate(self.difference, self.low, self.high), "+.3f")
        return (
            f"{self.first:.3f} → {self.second:.3f}, difference {difference}, "
            f"{p_text(self.adjusted_p_value)}, {self.prompts} prompts"
        )


def p_text(p_value: float | None) -> str:
    """``p = 0.031``, ``p < 0.001``, or ``no test``."""
    if p_value is None:
        return "no test"
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


def compared(
    first: Summary,
    second: Summary,
    iterations: Iterable[int],
    names: Iterable[str] | None = None,
    suite: str | None = None,
) -> list[Compared]:
    """Compares figures of two runs' policies, with p-values adjusted over all of them by Holm.

    What either run does not have, and figures that are the same for every prompt, are left out.

    Args:
        first: The run that is compared with.
        second: The other run.
        iterations: Iterations after which they are compared.
        names: The figures; None takes all that both runs have.
        suite: Suite of both runs; None compares the evaluations on held-out prompts.
    """
    found = []
    for iteration in iterations:
        before, now = (figures_of(each, iteration, suite) for each in (first, second))
        for name in names if names is not None else before:
            if name in before and name in now:
                found += _compared(iteration, name, before[name], now[name])
    return adjusted(found)


def adjusted(found: Sequence[Compared]) -> list[Compared]:
    """The same comparisons with p-values adjusted by Holm over all of them."""
    values = holm([each.p_value for each in found])
    return [
        replace(each, adjusted_p_value=value) for each, value in zip(found, values, strict=True)
    ]


def figures_of(
    summary: Summary, iteration: int, suite: str | None = None
) -> dict[str, PromptFigure]:
    """Figures of a run's policy after an iteration, prompt by prompt; none before it is there."""
    place, base = f"iteration-{iteration}/evaluate", "base"
    asked = summary.config.evaluation
    if suite is not None:
        if suite not in summary.config.suites:
            return {}
        asked = summary.config.suites[suite]
        place, base = suite_place(place, suite), suite_place(base, suite)
    if place not in summary.artifacts:
        return {}
    files = places(summary.artifacts, place, place, base, asked.num_shards)
    return prompt_figures(files, "policy", Solved.of(asked))


def _compared(iteration: int, name: str, before: PromptFigure, now: PromptFigure) -> list[Compared]:
    old, new = before.means(), now.means()
    shared = sorted(old.keys() & new.keys())
    if not shared or all(old[prompt] == new[prompt] for prompt in shared):
        return []
    first = np.array([old[prompt] for prompt in shared])
    second = np.array([new[prompt] for prompt in shared])
    difference = paired_difference(first, second)
    low, high = difference.estimate.interval or (None, None)
    return [
        Compared(
            *(iteration, name, len(shared), float(first.mean()), float(second.mean())),
            *(difference.estimate.value, low, high, difference.p_value),
        )
    ]
