"""Every figure of a report shows the values of its rows, point by point and bar by bar."""

import re

import numpy as np
import pytest

from flows.report.plots import ACCENT, POLICY, draw, histogram_figure, svg

REWARDS = [0.5, 0.7, 0.9]
WINS = [None, 0.6, 0.8]
KL = [None, 1.5, 4.0]
ROWS = [
    {
        "iteration": t,
        "mean_reward": REWARDS[t],
        "win_rate": WINS[t],
        "kl_to_base": KL[t],
        "intervals": {"mean_reward": (REWARDS[t] - 0.1, REWARDS[t] + 0.05)},
    }
    for t in range(3)
]


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return {title: svg(figure) for title, figure in draw({"small": ROWS}).items()}


def paths(svg: str, style: str) -> list[np.ndarray]:
    """Corners, [n, 2], of the drawn paths of a style: x to the right, y upwards."""
    found = re.findall(r'<path d="([^"]+)"[^>]*style="([^"]+)"', svg)
    corners = [re.findall(r"[ML] ([\d.]+) ([\d.]+)", path) for path, own in found if style in own]
    return [np.array(each, float) * (1, -1) for each in corners if each]


def line(svg: str, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions of a line's points."""
    # Marks of the legend lie at one height, and bars at one place.
    drawn = paths(svg, f"stroke: {colour}")
    first = next(each for each in drawn if np.all(np.ptp(each, axis=0) > 0))
    return first[:, 0], first[:, 1]


def assert_shows(positions: np.ndarray, values: list[float]) -> None:
    """Asserts that positions are values, scaled and shifted."""
    assert len(positions) == len(values)
    slope, shift = np.polyfit(values, positions, 1)
    assert slope > 0
    # The file keeps six digits.
    np.testing.assert_allclose(positions, slope * np.array(values) + shift, atol=1e-2)


def test_the_mean_reward_has_its_interval_as_a_bar(drawn: dict[str, str]) -> None:
    text = drawn["Mean reward, held-out prompts"]
    points = line(text, POLICY)[1]
    scale = (points[2] - points[0]) / (REWARDS[2] - REWARDS[0])
    drawn_paths = [each for each in paths(text, f"stroke: {POLICY}") if len(each) > 1]
    bars = [each[:, 1] for each in drawn_paths if np.ptp(each[:, 0]) == 0]
    assert len(bars) == 3
    for point, bar in zip(points, bars, strict=True):
        assert point - min(bar) == pytest.approx(0.1 * scale, abs=0.05)
        assert max(bar) - point == pytest.approx(0.05 * scale, abs=0.05)


@pytest.mark.parametrize(
    ("title", "x", "values"),
    [
        ("Mean reward, held-out prompts", [0, 1, 2], REWARDS),
        ("Win rate over the base, ties lost", [1, 2], WINS[1:]),
        ("KL to the base, held-out prompts", [1, 2], KL[1:]),
    ],
)
def test_figures_are_drawn_by_iteration(
    drawn: dict[str, str], title: str, x: list[float], values: list[float]
) -> None:
    drawn_x, drawn_y = line(drawn[title], POLICY)
    assert_shows(drawn_x, x)
    assert_shows(drawn_y, values)
    assert "iteration (0 = base)" in drawn[title]


def test_figures_of_one_iteration_are_left_out(drawn: dict[str, str]) -> None:
    assert len(drawn) == 3
    assert draw({"small": ROWS[:1]}) == {}


def test_several_runs_have_a_line_each_and_a_legend() -> None:
    two = draw({"small": ROWS, "large": ROWS[:2]})["Mean reward, held-out prompts"]
    assert [len(line.get_xdata()) for line in two.axes[0].lines] == [3, 2]
    assert ">small<" in svg(two) and ">large<" in svg(two)


def test_a_histogram_shows_the_share_of_samples_in_each_bin() -> None:
    samples = {"policy": [0.0, 1.0, 1.0, 1.0], "base": [0.0, 0.0, 0.0, 1.0]}
    text = svg(histogram_figure("Rewards", samples, "reward"))
    for colour, at_zero in ((POLICY, 0.25), (ACCENT, 0.75)):
        filled = paths(text, f"fill: {colour}")
        # The legend's patch is among them, ten points wide; a bar is narrow.
        bars = [each for each in filled if np.ptp(each[:, 0]) < 10 and np.ptp(each[:, 1]) > 0]
        heights = [np.ptp(each[:, 1]) for each in bars]
        assert len(heights) == 2
        assert heights[0] / sum(heights) == pytest.approx(at_zero, abs=0.01)
