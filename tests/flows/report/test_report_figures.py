"""Figures of a report show the values of its rows."""

import numpy as np
import pytest

from flows.report.plots import draw
from flows.report.table import figures_table
from tests.flows.report.evaluations import figure_row

ROWS = [
    figure_row(0, mean_reward=(0.5, 0.4, 0.55)),
    figure_row(1, mean_reward=0.7, win_rate=0.6, kl_to_base=1.5),
    figure_row(2, mean_reward=0.9, win_rate=0.8, kl_to_base=4.0),
]


@pytest.mark.parametrize(
    ("title", "points"),
    [
        ("Mean reward, held-out prompts", [(0, 0.5), (1, 0.7), (2, 0.9)]),
        ("Win rate over the base, ties lost", [(1, 0.6), (2, 0.8)]),
        ("KL to the base, held-out prompts", [(1, 1.5), (2, 4.0)]),
    ],
)
def test_figures_are_drawn_by_iteration(title, points):
    [axes] = draw({"small": ROWS})[title].axes
    [container] = axes.containers
    line, _, [bars] = container.lines
    np.testing.assert_allclose(line.get_xydata(), points)
    if title.startswith("Mean reward"):
        np.testing.assert_allclose(bars.get_segments()[0][:, 1], (0.4, 0.55))


def test_a_component_named_as_a_figure_gets_another_column():
    figures = {"accuracy": 0.9, "components.accuracy": 0.1, "components.style": 0.5}
    row = figure_row(1, **figures)
    [record] = figures_table("", ["run"], {("one",): row.cells()}).records()
    assert record["accuracy"] == "0.900"
    assert record["components.accuracy"] == "0.100"
    assert record["style"] == "0.500"
