"""The paper's report: one page with every table and figure, and its Markdown and JSON."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.tables import BASELINE, PARTS, Findings, coverage, file_name, paper_tables
from experiments.study import training_log_pi_ref
from flows.report.files import json_text, render, write_file
from flows.report.plots import course_figure, histogram_figure, png
from flows.report.statistics import over_seeds
from stages.store.base import Store

_GEB = "GEB"


@dataclass(frozen=True)
class WrittenReport:
    """The report, and the places of its files."""

    document: dict[str, Any]
    """Values for a JSON document; ``page`` is the page, an address in a bucket."""
    markdown: Path
    figures: Sequence[Path]
    """The figures that the Markdown shows, as PNG files in its folder."""

    def copy_to(self, folder: Path) -> None:
        """Copies the Markdown and its figures into a folder, which is made if it lacks."""
        for each in (self.markdown, *self.figures):
            write_file(folder / each.name, each.read_bytes())


def write_report(store: Store, name: str, found: Findings) -> WrittenReport:
    """Writes the report into the folder ``name`` of the store's runs, over an earlier one."""
    folder = store.run_path(name)
    drawn = _log_pi_ref(found) | kappa_figures(found)
    images = {f"{file}.png": png(figure) for file, figure in drawn.items()}
    tables = paper_tables(found)
    sections: list[dict[str, Any]] = [
        {
            "title": part.title,
            "note": part.note,
            "tables": [each for each in tables if each.name.startswith(f"{part.name}-")],
            "images": {
                file: base64.b64encode(image).decode()
                for file, image in images.items()
                if file.startswith(f"{part.name}-")
            },
        }
        for part in PARTS
    ]
    headline, covered = coverage(found)
    document: dict[str, Any] = {
        "scale": found.scale,
        "caution": found.caution,
        "coverage": headline,
        "failed": dict(found.failed),
        "tables": [
            {"name": table.name, "setting": table.setting, "rows": table.records()}
            for table in tables
        ],
        "runs": [
            {
                "run": each.name,
                "cell": " · ".join(each.row.names()),
                "seed": each.cell.config.seed,
                "coefficient": dict(each.coefficient),
                "tunes": each.tunes,
                "figures": dict(each.figures()),
            }
            for each in (*found.tuning, *found.reported)
        ],
    }
    page = "report.html"
    markdown = "report.md"
    content: dict[str, str | bytes] = {
        **images,
        page: render("paper.html.jinja", sections=sections, covered=covered, **document),
        markdown: render("paper.md.jinja", sections=sections, covered=covered, **document),
        "report.json": json_text(document),
    }
    written = {file: write_file(folder / file, each) for file, each in content.items()}
    store.share(folder)
    document["page"] = store.share(written[page])
    return WrittenReport(document, written[markdown], [written[file] for file in images])


def _log_pi_ref(found: Findings) -> dict[str, Figure]:
    """Training responses of the last iteration under KL: each design of GEB, and f-DPO."""

    @cache
    def samples(experiment: str, setting: str, method: str) -> list[float]:
        runs = found.results((experiment, setting, method, "KL"))
        summaries = (run.summary for run in runs if run.summary is not None)
        return [value for summary in summaries for value in training_log_pi_ref(summary)]

    drawn: dict[str, Figure] = {}
    for experiment, setting, method, divergence in (row.names() for row in found.rows):
        if experiment in ("main", "hard") and divergence == "KL" and method.startswith(_GEB):
            shown = {each: samples(experiment, setting, each) for each in (BASELINE, method)}
            if all(shown.values()):
                name = file_name("log-pi-ref", setting, method)
                drawn[name] = histogram_figure(f"{setting}, KL", shown, "log π_ref")
    return drawn


def kappa_figures(found: Findings) -> dict[str, Figure]:
    """Mean reward over κ, for each setting and divergence a figure, for each design a line."""
    rewards: dict[tuple[str, str], dict[str, dict[float, list[float]]]] = {}
    for run in found.tuning:
        experiment, setting, method, divergence = run.row.names()
        kappa = float(run.coefficient.get("train.kappa", 0.0))
        reward = run.figures().get("mean_reward")
        # The designs of GEB on rejected responses, as in the paper; ten lines hide each other.
        in_paper = method.startswith(_GEB) and experiment != "responses"
        if in_paper and kappa > 0 and reward is not None:
            line = rewards.setdefault((setting, divergence), {}).setdefault(method, {})
            line.setdefault(math.log10(kappa), []).append(reward)
    drawn: dict[str, Figure] = {}
    for (setting, divergence), by_method in rewards.items():
        lines = {
            method: {kappa: over_seeds(by_kappa[kappa]) for kappa in sorted(by_kappa)}
            for method, by_kappa in by_method.items()
        }
        if any(len(line) > 1 for line in lines.values()):
            figure = course_figure(f"{setting}, {divergence}", lines, "log₁₀ κ", "mean reward")
            drawn[file_name("kappa", setting, divergence)] = figure
    return drawn
