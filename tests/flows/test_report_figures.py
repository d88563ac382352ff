"""Every figure of a report shows the values of its artifacts, point by point and bar by bar."""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from flows.pipeline.config import RunConfig
from flows.report.plots import BASE, POLICY, Line, Plot, course_figure, draw
from flows.report.summary import Summary
from tests.flows.evaluations import artifact_in, write_evaluation

STEPS = 4
METRICS = {
    "loss": ("Training loss", [0.7, 0.5, 0.6, 0.2]),
    "bonus_ratio": ("|κ·bonus| / |L|", [1.0, 3.0, 2.0, 8.0]),
    "accuracy": ("Preference accuracy", [0.25, 0.5, 1.0, 0.75]),
    "tokens_per_second": ("Training, tokens per second", [10.0, 40.0, 20.0, 30.0]),
    "model_flops_utilisation": ("Training, share of the matrix-product rate", [0.1, 0.4, 0.3, 0.2]),
    "peak_memory_mib": ("Training, peak memory in MiB", [100.0, 200.0, 250.0, 300.0]),
}

REWARDS = [0.5, 0.7, 0.9]
WINS = [None, 0.6, 0.8]
POLITE = [0.1, 0.4, 0.3]


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Two iterations of two steps each, and the last one's samples; do not change it."""
    tmp_path = tmp_path_factory.mktemp("artifacts")
    steps = [{name: values[step] for name, (_, values) in METRICS.items()} for step in range(STEPS)]
    artifacts: dict[str, Any] = {}
    for iteration in (1, 2):
        folder = tmp_path / f"train-{iteration}"
        folder.mkdir()
        artifacts[f"iteration-{iteration}/train"] = artifact_in(folder)
        lines = steps[2 * iteration - 2 : 2 * iteration]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        place = tmp_path / f"evaluate-{iteration}"
        policy, base = {"p": [0.0, 1.0, 1.0, 1.0]}, {"p": [0.0, 0.0, 0.0, 1.0]}
        artifacts[f"iteration-{iteration}/evaluate"] = write_evaluation(place, policy, base)
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


def paths(svg: str, style: str) -> list[np.ndarray]:
    """Corners, [n, 2], of the drawn paths of a style: x to the right, y upwards."""
    found = re.findall(r'<path d="([^"]+)"[^>]*style="([^"]+)"', svg)
    corners = [re.findall(r"[ML] ([\d.]+) ([\d.]+)", path) for path, own in found if style in own]
    return [np.array(each, float) * (1, -1) for each in corners if each]


def line(svg: str, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions of a line's points."""
    # A mark of the legend has two points at one height.
    first = next(each for each in paths(svg, f"stroke: {colour}") if np.ptp(each[:, 1]) > 0)
    return first[:, 0], first[:, 1]


def assert_shows(positions: np.ndarray, values: list[float]) -> None:
    """Asserts that positions are values, scaled and shifted."""
    assert len(positions) == len(values)
    slope, shift = np.polyfit(values, positions, 1)
    assert slope > 0
    # The file keeps six digits.
    np.testing.assert_allclose(positions, slope * np.array(values) + shift, atol=1e-2)


def test_the_mean_reward_has_its_interval_as_a_bar(drawn: list[Plot]) -> None:
    svg = figure(drawn, "Mean reward, held-out prompts")
    points = line(svg, POLICY)[1]
    scale = (points[2] - points[0]) / (REWARDS[2] - REWARDS[0])
    drawn_paths = [each for each in paths(svg, f"stroke: {POLICY}") if len(each) > 1]
    bars = [each[:, 1] for each in drawn_paths if np.ptp(each[:, 0]) == 0]
    assert len(bars) == 3
    for point, bar in zip(points, bars, strict=True):
        assert point - min(bar) == pytest.approx(0.1 * scale, abs=0.05)
        assert max(bar) - point == pytest.approx(0.05 * scale, abs=0.05)


BY_ITERATION, BY_STEP = "iteration (0 = base)", "step, all iterations"


@pytest.mark.parametrize(
    ("title", "axis", "x", "values"),
    [
        ("Mean reward, held-out prompts", BY_ITERATION, [0, 1, 2], REWARDS),
        ("Win rate over the base, ties lost", BY_ITERATION, [1, 2], WINS[1:]),
        ("Oracle component polite", BY_ITERATION, [0, 1, 2], POLITE),
        *((title, BY_STEP, [1, 2, 3, 4], values) for title, values in METRICS.values()),
    ],
)
def test_figures_are_drawn_by_iteration_or_over_the_steps_of_all_iterations(
    drawn: list[Plot], title: str, axis: str, x: list[float], values: list[float]
) -> None:
    svg = figure(drawn, title)
    drawn_x, drawn_y = line(svg, POLICY)
    assert_shows(drawn_x, x)
    assert_shows(drawn_y, values)
    assert axis in svg


@pytest.mark.parametrize(
    "title",
    ["Rewards of the samples, last iteration", "log π_ref of the samples, last iteration"],
)
def test_a_histogram_shows_the_share_of_samples_in_each_bin(drawn: list[Plot], title: str) -> None:
    svg = figure(drawn, title)
    for model, colour, at_zero in (("policy", POLICY, 0.25), ("base", BASE, 0.75)):
        assert f">{model}<" in svg
        filled = paths(svg, f"fill: {colour}")
        # The legend's patch is among them, ten points wide; a bar is narrow.
        bars = [each for each in filled if np.ptp(each[:, 0]) < 10 and np.ptp(each[:, 1]) > 0]
        heights = [np.ptp(each[:, 1]) for each in bars]
        assert len(heights) == 2
        low, high = sorted(heights)
        assert low / (low + high) == pytest.approx(0.25, abs=0.01)
        # Zero is the first bin of the rewards and the last of the log-probabilities.
        first_is_zero = "Rewards" in title
        share = heights[0 if first_is_zero else -1] / sum(heights)
        assert share == pytest.approx(at_zero, abs=0.01)


RESULTS_GROUP = "Results by iteration"
SAMPLES_GROUP = "Samples of the last iteration, in numbers"


def test_there_is_no_figure_without_a_test(drawn: list[Plot]) -> None:
    learning, speed = (list(METRICS.values())[part] for part in (slice(3), slice(3, None)))
    assert [(each.group, each.title) for each in drawn] == [
        (RESULTS_GROUP, "Mean reward, held-out prompts"),
        (RESULTS_GROUP, "Win rate over the base, ties lost"),
        (RESULTS_GROUP, "Oracle component polite"),
        *(("Learning", title) for title, _ in learning),
        (SAMPLES_GROUP, "Rewards of the samples, last iteration"),
        (SAMPLES_GROUP, "log π_ref of the samples, last iteration"),
        *(("Speed", title) for title, _ in speed),
    ]


def test_what_a_run_lacks_is_left_out(summary: Summary) -> None:
    bare = dataclasses.replace(summary, artifacts={})
    assert {each.group for each in draw(bare)} == {RESULTS_GROUP}
    assert draw(dataclasses.replace(bare, rows=summary.rows[:1])) == []


def test_a_long_line_is_smoothed_and_has_a_gap_where_a_value_is_not_finite() -> None:
    values = [float(i % 7) for i in range(600)]
    values[100] = float("nan")
    figure = course_figure("loss", {"loss": Line(range(600), values)}, "step", "loss")
    means = np.asarray(figure.axes[0].lines[1].get_ydata())
    assert np.flatnonzero(np.isnan(means)).tolist() == list(range(80, 121))
    for place, window in ((0, values[:21]), (300, values[280:321]), (599, values[579:])):
        assert means[place] == pytest.approx(np.mean(window), rel=1e-12)
