"""Statements on the paper's methods: what holds against f-DPO, and what does not."""

from __future__ import annotations

from collections.abc import Sequence

from flows.report.between import p_text
from flows.report.paper_figures import BASELINE, DIVERGENCES, against_baseline, form_of
from flows.report.paper_values import PASS, Findings
from flows.report.statistics import Difference, holm
from flows.report.table import Cell


def statements(found: Findings) -> list[str]:
    """Statements that hold or not: every method against f-DPO, in each setting.

    Tested is the mean reward, on hard prompts pass@16 as well; p-values are by Holm over the
    methods and divergences of a setting, figure by figure.
    """
    lines = []
    for experiment in ("main", "hard"):
        for setting in found.settings(experiment):
            for figure in ("AvgR", *_pass_figures(found, experiment, setting)):
                lines += _statements(found, experiment, setting, figure)
    return lines


def _pass_figures(found: Findings, experiment: str, setting: str) -> list[str]:
    if experiment != "hard":
        return []
    own = [each for each in found.reported if each.run.row.setting == setting]
    suites = dict.fromkeys(name for each in own for name in each.run.cell.config.suites)
    return [PASS, *suites]


def _statements(found: Findings, experiment: str, setting: str, figure: str) -> list[str]:
    tested = []
    for method in found.methods(setting, experiment):
        for divergence in DIVERGENCES if method != BASELINE else ():
            at = experiment, setting, method, divergence
            difference = against_baseline(found, *at, figure)
            if difference is not None:
                seeds = [
                    len(found.results(experiment, setting, each, divergence))
                    for each in (method, BASELINE)
                ]
                tested.append((method, divergence, difference, seeds))
    adjusted = holm([difference.p_value for _, _, difference, _ in tested])
    return [
        _statement(setting, divergence, method, figure, difference, p_value, seeds)
        for (method, divergence, difference, seeds), p_value in zip(tested, adjusted, strict=True)
    ]


def _statement(
    setting: str,
    divergence: str,
    method: str,
    figure: str,
    difference: Difference,
    p_value: float | None,
    seeds: Sequence[int],
) -> str:
    verdict = "no difference shown"
    if p_value is not None and p_value < 0.05:
        verdict = "above" if difference.estimate.value > 0 else "below"
    form = f"+{form_of(figure)}"
    own = Cell.of(difference.estimate, form)
    place = f"{setting}, {divergence}, {figure}: {method} − {BASELINE} = {own}"
    test = f"{p_text(p_value)} (Welch, Holm; {seeds[0]} and {seeds[1]} seeds)"
    return f"{place}, {test}: {verdict}"
