"""The paper's report: tables and the figures of κ, in Markdown, and the values in JSON."""

import math
import re
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.tables import Findings, paper_tables
from experiments.study import FinishedRun
from flows.report.files import json_text
from flows.report.plots import course_figure, png
from stages.contract.atomic import write_atomically
from stages.evaluate.statistics import Estimate
from stages.store.base import Store

_LEGEND = """\
WR: share of prompts on which the policy's mean reward is above the base's; ties lose.
AvgR: mean reward. Math: accuracy on MATH-500. pass@16: chance that one of 16 samples is right, on
held-out prompts or on a suite. The paper gives shares in percent. Differences are from f-DPO under
the same divergence, with p of Welch's t test and p by Holm over the table. Intervals have 95 %: of
several seeds by Student, of one seed by a bootstrap over prompts. A dash is not computed."""


def write_report(store: Store, name: str, findings: Findings) -> tuple[dict[str, Any], str]:
    """Writes the report into the folder ``name`` of the store's runs, over an earlier one.

    Returns:
        Values for a JSON document, of which ``page`` is the report's address, and the Markdown.
    """
    folder = store.run_path(name)
    runs = {run.config.name for run in (*findings.tuning, *findings.reported)}
    headline = f"{len(runs)} runs of {len(findings.rows)} rows are finished."
    tables = paper_tables(findings)
    sections = [f"# {findings.title}", headline, _LEGEND]
    for table in tables:
        sections += [f"## {table.title}", table.markdown()]
    for title, figure in kappa_figures(findings).items():
        name_of_file = re.sub("[, ]+", "-", f"kappa-{title}.png").lower()
        write_atomically(folder / name_of_file, png(figure))
        sections.append(f"![κ and mean reward: {title}]({name_of_file})")
    for run, error in findings.failed.items():
        sections.append(f"{run} failed: {error}")
    text = "\n\n".join(sections) + "\n"
    document: dict[str, Any] = {
        "title": findings.title,
        "coverage": headline,
        "failed": dict(findings.failed),
        "tables": [{"title": table.title, "rows": table.records()} for table in tables],
        "tuning": [_record(run) for run in findings.tuning],
        "reported": [_record(run) for run in findings.reported],
    }
    page = store.write(folder / "report.md", text)
    store.write(folder / "report.json", json_text(document))
    store.share(folder)
    document["page"] = page
    return document, text


def _record(run: FinishedRun) -> dict[str, Any]:
    figures = run.figures()
    return {
        "run": run.config.name,
        "row": " · ".join(run.row.names),
        "seed": run.config.seed,
        "coefficient": dict(run.coefficient),
        "figures": {name: vars(figure) for name, figure in figures.items()},
    }


def kappa_figures(findings: Findings) -> dict[str, Figure]:
    """Mean reward over κ for each setting and divergence, a line for each design (Figure 3)."""
    lines: dict[str, dict[str, dict[float, Estimate]]] = {}
    for run in findings.tuning:
        row = run.row
        # Designs of GEB on rejected responses, as in the paper; ten lines hide each other.
        in_paper = row.method.startswith("GEB") and row.experiment != "responses"
        kappa = run.coefficient.get("train.kappa")
        # Zero has no logarithm.
        if in_paper and kappa:
            line = lines.setdefault(f"{row.setting}, {row.divergence}", {})
            points = line.setdefault(row.method, {})
            points[math.log10(kappa)] = run.figures()["mean_reward"]
    figures = {}
    for title, by_method in sorted(lines.items()):
        ordered = {method: dict(sorted(points.items())) for method, points in by_method.items()}
        figures[title] = course_figure(title, ordered, "log₁₀ κ", "mean reward")
    return figures
