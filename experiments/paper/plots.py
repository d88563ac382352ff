"""The paper's figures: log π_ref of two methods, κ, and the bandit's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from matplotlib.figure import Figure

from experiments.paper.tables import BASELINE, DIVERGENCES, file_name
from experiments.paper.values import Findings, Result
from flows.report.last_iteration import training_log_pi_ref
from flows.report.plots import Line, course_figure, histogram_figure
from flows.report.statistics import over_seeds

_KAPPA_FIELD = "train.kappa"
_GEB = "GEB"


def paper_figures(found: Findings) -> dict[str, Figure]:
    """Figures by the names of their files: log π_ref, then κ; the bandit's are images already."""
    return {**_log_pi_ref(found), **_kappa(found)}


def _log_pi_ref(found: Findings) -> dict[str, Figure]:
    """Training responses of the last iteration under KL: each design of GEB beside f-DPO."""
    drawn: dict[str, Figure] = {}
    for experiment in ("main", "hard"):
        for setting in found.settings(experiment):
            base = _samples(found.results((experiment, setting, BASELINE, "KL")))
            for method in found.methods(setting, experiment):
                own = _samples(found.results((experiment, setting, method, "KL")))
                if method.startswith(_GEB) and own and base:
                    drawn[file_name("log-pi-ref", setting, method)] = histogram_figure(
                        f"{setting}, KL: training responses",
                        {BASELINE: base, method: own},
                        "log π_ref",
                    )
    return drawn


def _samples(results: list[Result]) -> list[float]:
    return [value for each in results for value in training_log_pi_ref(each.summary)]


def _kappa(found: Findings) -> dict[str, Figure]:
    """Mean reward over κ, for each setting and divergence a figure, for each design a line."""
    drawn: dict[str, Figure] = {}
    settings = dict.fromkeys(each.run.row.setting for each in found.tuning)
    for setting in settings:
        for divergence in DIVERGENCES:
            lines = _kappa_lines(found, setting, divergence)
            if any(len(line.x) > 1 for line in lines.values()):
                drawn[file_name("kappa", setting, divergence)] = course_figure(
                    f"{setting}, {divergence}", lines, "log₁₀ κ", "mean reward"
                )
    return drawn


def _kappa_lines(found: Findings, setting: str, divergence: str) -> Mapping[str, Line]:
    values: dict[str, dict[float, list[float]]] = {}
    for each in found.tuning:
        row = each.run.row
        # The designs of GEB on rejected responses, as in the paper; ten lines hide each other.
        if not row.method.startswith(_GEB) or row.experiment == "responses":
            continue
        kappa = float(each.run.coefficient.get(_KAPPA_FIELD, 0.0))
        reward = each.value("AvgR")
        if (row.setting, row.divergence) == (setting, divergence) and kappa > 0 and reward:
            values.setdefault(row.method, {}).setdefault(kappa, []).append(reward.value)
    return {
        method: Line(
            [math.log10(kappa) for kappa in sorted(by_kappa)],
            [statistics.fmean(by_kappa[kappa]) for kappa in sorted(by_kappa)],
            [over_seeds(by_kappa[kappa]).interval for kappa in sorted(by_kappa)],
        )
        for method, by_kappa in values.items()
    }
