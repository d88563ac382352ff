"""The HTML report of a run: one file, no network, every figure traceable to its artifact."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import jinja2
import pyarrow.parquet as pq
import yaml

from flows.execution.run_record import RunRecord
from flows.report.plots import histogram, line_plot
from flows.report.spending import spending
from flows.report.summary import Summary
from stages.contract.data_files import read_data_file
from stages.contract.store import Artifact

_SHOWN_SAMPLES = 8
_STEP_PARTS = ("data", "forward", "backward", "optimizer")
# A histogram gains nothing from more, and the report stays small.
_MAX_PLOTTED = 20_000


def write(record: RunRecord, summary: Summary, plots: Sequence[str]) -> str:
    """Writes ``report.html`` into the run's folder and returns its place.

    Args:
        record: The run.
        summary: Its results.
        plots: What :func:`draw` drew of them.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flows.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    last = _last(summary, "evaluate")
    page = environment.get_template("report.html.jinja").render(
        summary=summary,
        plots=plots,
        samples=_samples(last),
        gates=_gates(summary),
        spending=spending(record, summary),
        configuration=yaml.safe_dump(
            json.loads(summary.config.to_json()), sort_keys=False, allow_unicode=True
        ),
    )
    path = record.path / "report.html"
    path.write_text(page, encoding="utf-8")
    return record.store.share(path)


def _last(summary: Summary, stage: str) -> Artifact | None:
    found = [
        summary.artifacts.get(f"iteration-{t}/{stage}")
        for t in range(1, summary.config.iterations + 1)
    ]
    done = [each for each in found if each is not None]
    return done[-1] if done else None


def draw(summary: Summary) -> list[str]:
    """The report's plots as SVG, the mean reward by iteration first."""
    drawn = []
    rewards = [(row["iteration"], row["mean_reward"]) for row in summary.rows]
    known = [(t, value) for t, value in rewards if value is not None]
    if len(known) > 1:
        x, y = zip(*known, strict=True)
        drawn.append(
            line_plot("Mean reward, held-out prompts", {"reward": (x, y)}, "iteration (0 = base)")
        )
    steps = _training(summary)
    for name, title in (
        ("loss", "Training loss"),
        ("bonus_ratio", "|κ·bonus| / |L|"),
        ("accuracy", "Preference accuracy"),
        ("tokens_per_second", "Training, tokens per second"),
        ("model_flops_utilisation", "Training, share of the matrix-product rate"),
        ("peak_memory_mib", "Training, peak memory in MiB"),
    ):
        x, y = _curve(steps, name)
        if len(x) > 1:
            drawn.append(line_plot(title, {name: (x, y)}, "step, all iterations"))
    parts = {part: _curve(steps, f"{part}_seconds") for part in _STEP_PARTS}
    if all(len(x) > 1 for x, _ in parts.values()):
        drawn.append(line_plot("Training, seconds of a step", parts, "step, all iterations"))
    if (last := _last(summary, "evaluate")) is not None:
        drawn += _distributions(last)
    return drawn


def _curve(
    steps: list[tuple[int, dict[str, Any]]], name: str
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    values = [(step, metrics[name]) for step, metrics in steps if name in metrics]
    return tuple(step for step, _ in values), tuple(value for _, value in values)


def _training(summary: Summary) -> list[tuple[int, dict[str, Any]]]:
    """Metrics of every training step of the run, iterations one after the other."""
    steps: list[tuple[int, dict[str, Any]]] = []
    for iteration in range(1, summary.config.iterations + 1):
        artifact = summary.artifacts.get(f"iteration-{iteration}/train")
        if artifact is not None:
            for _, metrics in read_data_file(artifact.file("metrics.jsonl")):
                steps.append((len(steps) + 1, metrics))
    return steps


def _distributions(artifact: Artifact) -> list[str]:
    table = pq.read_table(artifact.file("distributions.parquet"))
    drawn = []
    for column, title, label in (
        ("reward", "Rewards of the samples, last iteration", "reward"),
        ("log_pi_ref", "log π_ref of the samples, last iteration", "log π_ref"),
    ):
        samples: dict[str, list[float]] = {}
        for model, value in zip(table["model"].to_pylist(), table[column].to_pylist(), strict=True):
            if value is not None:
                samples.setdefault(model, []).append(value)
        if samples:
            thinned = {
                model: values[:: len(values) // _MAX_PLOTTED + 1]
                for model, values in samples.items()
            }
            drawn.append(histogram(title, thinned, label))
    return drawn


def _samples(artifact: Artifact | None) -> list[dict[str, Any]]:
    if artifact is None:
        return []
    rows = read_data_file(artifact.file("samples.jsonl"))
    return [row for _, row in itertools.islice(rows, _SHOWN_SAMPLES)]


def _gates(summary: Summary) -> list[tuple[int, dict[str, Any]]]:
    decisions = []
    for iteration in range(1, summary.config.iterations + 1):
        artifact = summary.artifacts.get(f"iteration-{iteration}/promote")
        if artifact is not None:
            text = artifact.file("decision.json").read_text()
            decisions.append((iteration, json.loads(text)))
    return decisions
