"""Figures of a run's report: results by iteration, learning and speed by step, distributions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow.parquet as pq

from flows.report.plots import Line, course_figure, histogram_figure, svg
from flows.report.summary import Summary
from stages.contract.data_files import read_data_file
from stages.contract.store import Artifact

_STEP_PARTS = ("data", "forward", "backward", "optimizer")
_LEARNING = (
    ("loss", "Training loss", "loss"),
    ("bonus_ratio", "|κ·bonus| / |L|", "ratio"),
    ("accuracy", "Preference accuracy", "share of pairs"),
)
_PREFERENCE_LOSS = ("preference_loss", "Preference loss", "loss")
_VALIDATION = "validation_"
_SPEED = (
    ("tokens_per_second", "Training, tokens per second", "tokens/s"),
    ("model_flops_utilisation", "Training, share of the matrix-product rate", "share"),
    ("peak_memory_mib", "Training, peak memory in MiB", "MiB"),
)
_ITERATION = "iteration (0 = base)"
_STEP = "step, all iterations"

Group = Literal["results", "learning", "samples", "speed"]


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        title: What it shows.
        group: The part of the report that it is in.
        svg: The drawing.
    """

    title: str
    group: Group
    svg: str


def draw(summary: Summary) -> list[Plot]:
    """The figures that a run has, results first."""
    drawn = list(_results(summary))
    steps, marks = _training(summary)
    validated = any(f"{_VALIDATION}preference_loss" in metrics for _, metrics in steps)
    for name, title, ylabel in (*_LEARNING, *([_PREFERENCE_LOSS] if validated else [])):
        drawn += _step_plot(steps, marks, name, title, ylabel, "learning")
    if (last := summary.last("evaluate")) is not None:
        drawn += _distributions(last)
    for name, title, ylabel in _SPEED:
        drawn += _step_plot(steps, marks, name, title, ylabel, "speed")
    parts = {part: _curve(steps, f"{part}_seconds") for part in _STEP_PARTS}
    if all(len(each.x) > 1 for each in parts.values()):
        title = "Training, seconds of a step"
        figure = course_figure(title, parts, _STEP, "seconds", marks=marks)
        drawn.append(Plot(title, "speed", svg(figure)))
    return drawn


def _results(summary: Summary) -> Iterator[Plot]:
    """Figures on the held-out prompts by iteration, with their 95 % intervals."""
    reward = "Mean reward, held-out prompts"
    yield from _by_iteration(summary, reward, "reward", "mean_reward")
    win = "Win rate over the base, ties lost"
    yield from _by_iteration(summary, win, "share of prompts", "win_rate", bounds=(0.0, 1.0))
    for name in summary.components():
        title = f"Oracle component {name}"
        yield from _by_iteration(summary, title, name, f"components.{name}")


def _by_iteration(
    summary: Summary,
    title: str,
    ylabel: str,
    figure: str,
    *,
    bounds: tuple[float, float] | None = None,
) -> Iterator[Plot]:
    known = [
        (row["iteration"], value, row.get("intervals", {}).get(figure))
        for row in summary.rows
        if (value := _figure(row, figure)) is not None
    ]
    if len(known) > 1:
        x, y, intervals = zip(*known, strict=True)
        series = {figure: Line(x, y, intervals)}
        drawn = course_figure(title, series, _ITERATION, ylabel, bounds=bounds)
        yield Plot(title, "results", svg(drawn))


def _figure(row: Mapping[str, Any], name: str) -> float | None:
    group, _, component = name.partition(".")
    value = row.get("components", {}).get(component) if component else row.get(group)
    return None if value is None else float(value)


def _step_plot(
    steps: Sequence[tuple[int, dict[str, Any]]],
    marks: Sequence[float],
    name: str,
    title: str,
    ylabel: str,
    group: Group,
) -> Iterator[Plot]:
    curve = _curve(steps, name)
    if len(curve.x) > 1:
        lines = {name: curve}
        validation = _curve(steps, _VALIDATION + name)
        if validation.x:
            lines = {"trained on": curve, "validation": validation}
        bounds = (0.0, 1.0) if name == "accuracy" else None
        figure = course_figure(title, lines, _STEP, ylabel, marks=marks, bounds=bounds)
        yield Plot(title, group, svg(figure))


def _curve(steps: Sequence[tuple[int, dict[str, Any]]], name: str) -> Line:
    values = [(step, metrics[name]) for step, metrics in steps if name in metrics]
    return Line(tuple(step for step, _ in values), tuple(value for _, value in values))


def _training(summary: Summary) -> tuple[list[tuple[int, dict[str, Any]]], list[float]]:
    """Metrics of all training steps, one iteration after the other, and where the next begin."""
    steps: list[tuple[int, dict[str, Any]]] = []
    marks: list[float] = []
    for _, artifact in summary.made("train"):
        if steps:
            marks.append(len(steps) + 0.5)
        for _, metrics in read_data_file(artifact.file("metrics.jsonl")):
            steps.append((len(steps) + 1, metrics))
    return steps, marks


def _distributions(artifact: Artifact) -> Iterator[Plot]:
    table = pq.read_table(artifact.file("distributions.parquet"))
    for column, title, label in (
        ("reward", "Rewards of the samples, last iteration", "reward"),
        ("log_pi_ref", "log π_ref of the samples, last iteration", "log π_ref"),
    ):
        samples: dict[str, list[float]] = {}
        for model, value in zip(table["model"].to_pylist(), table[column].to_pylist(), strict=True):
            if value is not None:
                samples.setdefault(model, []).append(value)
        if samples:
            yield Plot(title, "samples", svg(histogram_figure(title, samples, label)))
