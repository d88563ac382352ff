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
        for file in (self.markdown, *self.figures):
            write_file(folder / file.name, file.read_bytes())


def write_report(store: Store, name: str, found: Findings) -> WrittenReport:
    """Writes the report into the folder ``name`` of the store's runs, over an earlier one."""
    folder = store.run_path(name)
    drawn = _log_pi_ref(found) | kappa_figures(found)
    images = {f"{file}.png": png(figure) for file, figure in drawn.items()}
    encoded = {file: base64.b64encode(image).decode() for file, image in images.items()}
    tables = paper_tables(found)
    sections: list[dict[str, Any]] = []
    for part in PARTS:
        prefix = f"{part.name}-"
        section = {
            "title": part.title,
            "note": part.note,
            "tables": [table for table in tables if table.name.startswith(prefix)],
            "images": {file: encoded[file] for file in encoded if file.startswith(prefix)},
        }
        sections.append(section)
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
                "run": run.name,
                "cell": " · ".join(run.row.names()),
                "seed": run.cell.config.seed,
                "coefficient": dict(run.coefficient),
                "tunes": run.tunes,
                "figures": dict(run.figures()),
            }
            for run in (*found.tuning, *found.reported)
        ],
    }
    values = {"sections": sections, "covered": covered, **document}
    figures = [write_file(folder / file, image) for file, image in images.items()]
    page = write_file(folder / "report.html", render("paper.html.jinja", **values))
    markdown = write_file(folder / "report.md", render("paper.md.jinja", **values))
    write_file(folder / "report.json", json_text(document))
    store.share(folder)
    document["page"] = store.share(page)
    return WrittenReport(document, markdown, figures)


def _log_pi_ref(found: Findings) -> dict[str, Figure]:
    """Training responses of the last iteration under KL: each design of GEB, and f-DPO."""

    @cache
    def samples(experiment: str, setting: str, method: str) -> list[float]:
        values: list[float] = []
        for run in found.results((experiment, setting, method, "KL")):
            if run.summary is not None:
                values += training_log_pi_ref(run.summary)
        return values

    drawn: dict[str, Figure] = {}
    for row in found.rows:
        is_shown = row.experiment in ("main", "hard") and row.divergence == "KL"
        if is_shown and row.method.startswith(_GEB):
            lines = {
                method: samples(row.experiment, row.setting, method)
                for method in (BASELINE, row.method)
            }
            if all(lines.values()):
                name = file_name("log-pi-ref", row.setting, row.method)
                drawn[name] = histogram_figure(f"{row.setting}, KL", lines, "log π_ref")
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
