"""Every figure of a report shows the values of its artifacts, point by point and bar by bar."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.pipeline.config import RunConfig
from flows.report.figures import Plot, draw
from flows.report.plots import ACCENT, BASE, POLICY, Line, course_figure
from flows.report.summary import Summary
from stages.contract.tables import DISTRIBUTIONS, write_table
from tests.flows.evaluations import artifact_in

STEPS = 4
METRICS = {
    "loss": ("Training loss", [0.7, 0.5, 0.6, 0.2]),
    "bonus_ratio": ("|κ·bonus| / |L|", [1.0, 3.0, 2.0, 8.0]),
    "accuracy": ("Preference accuracy", [0.25, 0.5, 1.0, 0.75]),
    "tokens_per_second": ("Training, tokens per second", [10.0, 40.0, 20.0, 30.0]),
    "model_flops_utilisation": ("Training, share of the matrix-product rate", [0.1, 0.4, 0.3, 0.2]),
    "peak_memory_mib": ("Training, peak memory in MiB", [100.0, 200.0, 250.0, 300.0]),
}
PARTS = {
    "data": [0.1, 0.2, 0.1, 0.3],
    "forward": [1.0, 2.0, 1.5, 1.0],
    "backward": [2.0, 4.0, 3.0, 2.5],
    "optimizer": [0.5, 0.6, 0.4, 0.7],
}
PART_COLOURS = (POLICY, ACCENT, "#4a8f5c", "#7d5ba6")


REWARDS = [0.5, 0.7, 0.9]
WINS = [None, 0.6, 0.8]
POLITE = [0.1, 0.4, 0.3]


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Two iterations of two steps each, and the last one's samples; do not change it."""
    tmp_path = tmp_path_factory.mktemp("artifacts")
    steps = [
        {name: values[step] for name, (_, values) in METRICS.items()}
        | {f"{part}_seconds": values[step] for part, values in PARTS.items()}
        for step in range(STEPS)
    ]
    artifacts: dict[str, Any] = {}
    for iteration in (1, 2):
        for stage in ("train", "evaluate"):
            folder = tmp_path / f"{stage}-{iteration}"
            folder.mkdir()
            artifacts[f"iteration-{iteration}/{stage}"] = artifact_in(folder)
        lines = steps[2 * iteration - 2 : 2 * iteration]
        (tmp_path / f"train-{iteration}/metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        rewards = {"policy": [0.0, 1.0, 1.0, 1.0], "base": [0.0, 0.0, 0.0, 1.0]}
        write_table(
            tmp_path / f"evaluate-{iteration}/distributions.parquet",
            DISTRIBUTIONS,
            [
                {
                    "model": model,
                    "prompt_id": "p",
                    "sample_index": index,
                    "reward": value,
                    "log_pi": -1.0,
                    "num_tokens": 5,
                    "log_pi_ref": -10 * value,
                }
                for model, values in rewards.items()
                for index, value in enumerate(values)
            ],
        )
    rows = [
        {
            "iteration": t,
            "mean_reward": REWARDS[t],
            "win_rate": WINS[t],
            "components": {"polite": POLITE[t]},
            "intervals": {"mean_reward": (REWARDS[t] - 0.1, REWARDS[t] + 0.05)},
        }
        for t in range(3)
    ]
    config = RunConfig(iterations=2)
    return Summary("small", config, "store", artifacts=artifacts, rows=rows)


@pytest.fixture(scope="module")
def drawn(summary: Summary) -> list[Plot]:
    return draw(summary)


def figure(drawn: list[Plot], title: str) -> str:
    [found] = [each.svg for each in drawn if f">{title}<" in each.svg]
    return found


def line(svg: str, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions of a line's points: x to the right, y upwards."""
    for path, style in re.findall(r'<path d="([^"]+)"[^>]*style="([^"]+)"', svg):
        points = re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)
        # A mark of the legend has two points at one height.
        if f"stroke: {colour}" in style and len({y for _, y in points}) > 1:
            x, y = zip(*points, strict=True)
            return np.array(x, float), -np.array(y, float)
    raise AssertionError(f"no line of {colour}")


def assert_shows(positions: np.ndarray, values: list[float]) -> None:
    """Asserts that positions are values, scaled and shifted."""
    assert len(positions) == len(values)
    slope, shift = np.polyfit(values, positions, 1)
    assert slope > 0
    # The file keeps six digits.
    np.testing.assert_allclose(positions, slope * np.array(values) + shift, atol=1e-2)


def test_the_mean_reward_is_drawn_by_iteration(drawn: list[Plot]) -> None:
    svg = figure(drawn, "Mean reward, held-out prompts")
    x, y = line(svg, POLICY)
    assert_shows(x, [0, 1, 2])
    assert_shows(y, [0.5, 0.7, 0.9])
    assert "iteration (0 = base)" in svg


def test_the_mean_reward_has_its_interval_as_a_bar(drawn: list[Plot]) -> None:
    svg = figure(drawn, "Mean reward, held-out prompts")
    points = -line(svg, POLICY)[1]
    scale = (points[2] - points[0]) / (REWARDS[2] - REWARDS[0])
    bars = []
    for path, style in re.findall(r'<path d="([^"]+)"[^>]*style="([^"]+)"', svg):
        corners = re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)
        if f"stroke: {POLICY}" in style and len({x for x, _ in corners}) == 1 < len(corners):
            bars.append([float(y) for _, y in corners])
    assert len(bars) == 3
    for point, bar in zip(points, bars, strict=True):
        assert max(bar) - point == pytest.approx(-0.1 * scale, abs=0.05)
        assert point - min(bar) == pytest.approx(-0.05 * scale, abs=0.05)


@pytest.mark.parametrize(
    ("title", "x", "values"),
    [
        ("Win rate over the base, ties lost", [1, 2], WINS[1:]),
        ("Oracle component polite", [0, 1, 2], POLITE),
    ],
)
def test_win_rate_and_components_are_drawn_by_iteration(
    drawn: list[Plot], title: str, x: list[float], values: list[float]
) -> None:
    drawn_x, drawn_y = line(figure(drawn, title), POLICY)
    assert_shows(drawn_x, x)
    assert_shows(drawn_y, values)


def test_plots_come_by_groups_with_titles_of_their_own(drawn: list[Plot]) -> None:
    assert [each.title for each in drawn][:3] == [
        "Mean reward, held-out prompts",
        "Win rate over the base, ties lost",
        "Oracle component polite",
    ]
    groups = list(dict.fromkeys(each.group for each in drawn))
    assert groups == ["results", "learning", "samples", "speed"]
    assert len({each.title for each in drawn}) == len(drawn)


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_of_training_is_drawn_over_the_steps_of_all_iterations(
    drawn: list[Plot], metric: str
) -> None:
    title, values = METRICS[metric]
    svg = figure(drawn, title)
    x, y = line(svg, POLICY)
    assert_shows(x, [1, 2, 3, 4])
    assert_shows(y, values)
    assert "step, all iterations" in svg


@pytest.mark.parametrize(("part", "colour"), [*zip(PARTS, PART_COLOURS, strict=True)])
def test_the_parts_of_a_step_are_one_figure(drawn: list[Plot], part: str, colour: str) -> None:
    svg = figure(drawn, "Training, seconds of a step")
    _, y = line(svg, colour)
    assert_shows(y, PARTS[part])
    assert f">{part}<" in svg


@pytest.mark.parametrize(
    ("title", "at_zero"),
    [
        ("Rewards of the samples, last iteration", {"policy": 0.25, "base": 0.75}),
        ("log π_ref of the samples, last iteration", {"policy": 0.25, "base": 0.75}),
    ],
)
def test_a_histogram_shows_the_share_of_samples_in_each_bin(
    drawn: list[Plot], title: str, at_zero: dict[str, float]
) -> None:
    svg = figure(drawn, title)
    for model, colour in (("policy", POLICY), ("base", BASE)):
        assert f">{model}<" in svg
        heights = []
        for path, style in re.findall(r'<path d="([^"]+)"[^>]*style="([^"]+)"', svg):
            corners = re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)
            ys = [float(y) for _, y in corners]
            # The legend's patch is among them, ten points wide; a bar is narrow.
            width = max(float(x) for x, _ in corners) - min(float(x) for x, _ in corners)
            if f"fill: {colour}" in style and width < 10 and max(ys) > min(ys):
                heights.append(max(ys) - min(ys))
        assert len(heights) == 2
        low, high = sorted(heights)
        assert low / (low + high) == pytest.approx(0.25, abs=0.01)
        # Zero is the first bin of the rewards and the last of the log-probabilities.
        first_is_zero = "Rewards" in title
        share = heights[0 if first_is_zero else -1] / sum(heights)
        assert share == pytest.approx(at_zero[model], abs=0.01)


def test_there_is_no_figure_without_a_test(drawn: list[Plot]) -> None:
    titles = [title for title, _ in METRICS.values()]
    titles += ["Mean reward, held-out prompts", "Training, seconds of a step"]
    titles += ["Win rate over the base, ties lost", "Oracle component polite"]
    titles += ["Rewards of the samples, last iteration", "log π_ref of the samples, last iteration"]
    assert len(drawn) == len(titles)
    for title in titles:
        figure(drawn, title)


def test_validation_pairs_are_a_line_of_their_own(summary: Summary, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    losses, accuracies = [0.6, 0.4, 0.3, 0.2], [0.5, 0.6, 0.8, 1.0]
    steps = [
        {"loss": 1.0, "preference_loss": loss, "accuracy": accuracy}
        for loss, accuracy in zip(losses, accuracies, strict=True)
    ]
    steps[1] |= {"validation_preference_loss": 0.5, "validation_accuracy": 0.5}
    steps[3] |= {"validation_preference_loss": 0.7, "validation_accuracy": 0.25}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    found = draw(dataclasses.replace(summary, artifacts={"iteration-1/train": artifact_in(folder)}))
    learning = [each.title for each in found if each.group == "learning"]
    assert learning == ["Training loss", "Preference accuracy", "Preference loss"]
    for title, trained, validation in (
        ("Preference loss", losses, [0.5, 0.7]),
        ("Preference accuracy", accuracies, [0.5, 0.25]),
    ):
        svg = figure(found, title)
        x, y = line(svg, POLICY)
        other_x, other_y = line(svg, ACCENT)
        assert_shows(np.concatenate([x, other_x]), [1, 2, 3, 4, 2, 4])
        assert_shows(np.concatenate([y, other_y]), [*trained, *validation])
        assert ">trained on<" in svg
        assert ">validation<" in svg


def test_what_a_run_lacks_is_left_out(summary: Summary) -> None:
    bare = dataclasses.replace(summary, artifacts={})
    assert {each.group for each in draw(bare)} == {"results"}
    assert draw(dataclasses.replace(bare, rows=summary.rows[:1])) == []


class Counted(Sequence[float]):
    """Values that count how often they are read."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: Any) -> Any:
        found = self.values[place]
        self.num_reads += len(found) if isinstance(place, slice) else 1
        return found


def test_a_long_line_is_smoothed_in_one_pass_and_has_a_gap_where_a_value_is_not_finite() -> None:
    values = [float(i % 7) for i in range(600)]
    values[100] = float("nan")
    counted = Counted(values)
    figure = course_figure("loss", {"loss": Line(range(600), counted)}, "step", "loss")
    assert counted.num_reads <= 10 * len(values)
    means = np.asarray(figure.axes[0].lines[1].get_ydata())
    assert np.flatnonzero(np.isnan(means)).tolist() == list(range(80, 121))
    for place, window in ((0, values[:21]), (300, values[280:321]), (599, values[579:])):
        assert means[place] == pytest.approx(np.mean(window), rel=1e-12)
