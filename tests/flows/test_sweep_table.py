"""A sweep's table over seeds, and its tests of one combination against another."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from flows.pipeline.config import RunConfig
from flows.pipeline.grid import Cell
from flows.report.summary import Summary
from flows.report.table import COLUMNS
from flows.sweep import Finding, Sweep

ONE, TWO = [0.5, 0.6, 0.55], [0.9, 0.8, 0.85]


def finding(kappa: float, seed: int, reward: float | None) -> Finding:
    config = RunConfig(seed=seed)
    row: dict[str, Any] = {each.name: None for each in COLUMNS}
    row |= {"iteration": 3, "mean_reward": reward, "solved": {}, "components": {}}
    return Finding(Cell({"train.kappa": kappa}, config), Summary("run", config, "s", rows=[row]))


def swept(first: list[float], second: list[float]) -> Sweep:
    found = [finding(0.5, seed, reward) for seed, reward in enumerate(first)]
    return Sweep("try", found + [finding(1.0, seed, reward) for seed, reward in enumerate(second)])


def test_a_row_has_mean_deviation_and_student_s_interval() -> None:
    row, _ = swept(ONE, TWO).rows()
    # t(0.975, 2) = 4.303, so ± 4.303 · 0.05 / √3.
    assert row["mean reward"] == "0.550 ± 0.05 [0.426, 0.674]"
    assert row["win rate"] == "-"


def test_combinations_are_tested_against_the_first_by_welch_and_holm() -> None:
    [found] = swept(ONE, TWO).comparisons()
    expected = stats.ttest_ind(TWO, ONE, equal_var=False).pvalue
    assert (found["grid"], found["against"]) == ("train.kappa=1.0", "train.kappa=0.5")
    assert found["difference"] == pytest.approx(0.3)
    assert found["p_value"] == found["adjusted_p_value"] == pytest.approx(expected)
    [note] = swept(ONE, TWO).notes()
    assert note.startswith("train.kappa=1.0 against train.kappa=0.5: mean_reward +0.300 [+0.187")


def test_one_seed_or_one_combination_is_not_tested() -> None:
    assert swept([0.5], [0.9]).notes() == []
    assert Sweep("try", [finding(0.5, 0, 0.5)]).comparisons() == []
