"""A sweep's table over seeds, and its tests of one combination against another."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

from flows.pipeline.config import RunConfig
from flows.pipeline.grid import Cell
from flows.report.summary import Summary
from flows.report.sweep import Finding, Sweep, write_sweep
from flows.report.table import COLUMNS
from flows.sweep import run_cells

ONE, TWO = [0.5, 0.6, 0.55], [0.9, 0.8, 0.85]


def finding(kappa: float, seed: int, reward: float | None) -> Finding:
    config = RunConfig(seed=seed)
    row: dict[str, Any] = {each.name: None for each in COLUMNS}
    row |= {"iteration": 3, "mean_reward": reward, "solved": {}, "components": {}}
    return Finding(Cell({"train.kappa": kappa}, config), Summary("run", config, "s", rows=[row]))


def swept(first: list[float], second: list[float]) -> Sweep:
    found = [finding(0.5, seed, reward) for seed, reward in enumerate(first)]
    return Sweep("try", found + [finding(1.0, seed, reward) for seed, reward in enumerate(second)])


def test_combinations_are_tested_against_the_first_by_welch_and_holm() -> None:
    [found] = swept(ONE, TWO).comparisons()
    expected = stats.ttest_ind(TWO, ONE, equal_var=False).pvalue
    assert found.method == "train.kappa=1.0"
    assert found.difference is not None
    assert found.difference.value == pytest.approx(0.3)
    assert found.difference.p_value == found.adjusted_p_value == pytest.approx(expected)
    assert swept([0.5], [0.9]).notes() == [], "one seed"
    assert Sweep("try", [finding(0.5, 0, 0.5)]).comparisons() == [], "one combination"
    [note] = swept(ONE, TWO).notes()
    assert note.startswith("train.kappa=1.0 against train.kappa=0.5: mean_reward +0.300 [+0.187")


def test_an_interrupt_starts_no_further_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def interrupted(config: RunConfig) -> None:
        started.append(config.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.sweep.iterate_resolved", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_cells([Cell({}, RunConfig(seed=seed)) for seed in range(3)], 1)
    assert started == [0]


def shown(width: int) -> str:
    printed = io.StringIO()
    console = Console(width=width, file=printed, soft_wrap=True)
    console.print(swept(ONE, TWO).table())
    return printed.getvalue()


def test_a_narrow_terminal_shows_the_grid_and_whole_figures() -> None:
    wide, narrow = shown(300), shown(50)
    assert "distinct-4" in wide
    assert "no room for" not in wide
    assert max(map(len, narrow.splitlines()[:-1])) <= 50
    for text in ("train.kappa=0.5", "train.kappa=1.0", "0.550 ± 0.05", "[0.426, 0.674]"):
        assert text in narrow
    assert "…" not in narrow
    note = narrow.splitlines()[-1]
    assert note.startswith("no room for: ")
    assert note.endswith("(all are in sweep.csv)")
    assert "distinct-4" in note
    assert "mean reward" not in note
    # However narrow: what is always shown is folded, not cut.
    assert "train.kappa=0.5" in shown(15).replace("\n", "").replace(" ", "")


def test_files_have_a_row_per_combination_and_figure_and_one_per_run(tmp_path: Path) -> None:
    written = write_sweep(swept(ONE, TWO), tmp_path)
    with written["table"].open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["train.kappa"], first["figure"], first["runs"]) == ("0.5", "mean_reward", "3")
    assert float(first["mean"]) == pytest.approx(0.55)
    assert float(first["low"]) == pytest.approx(0.4258, abs=1e-4)
    assert float(second["high"]) == pytest.approx(0.9742, abs=1e-4)
    with written["runs"].open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert [float(run["mean_reward"]) for run in runs] == ONE + TWO
    assert [run["seed"] for run in runs] == ["0", "1", "2"] * 2
    assert written["plot"].read_bytes().startswith(b"\x89PNG")
    # Without results there is no plot.
    failed = Sweep("try", [Finding(finding(0.5, 0, 0.5).cell, None, "out of memory")])
    written = write_sweep(failed, tmp_path)
    assert "plot" not in written
    assert "out of memory" in written["runs"].read_text()


def test_a_row_has_student_s_interval_which_ends_where_shares_do() -> None:
    rates = [1.0, 0.8, 1.0]
    found = swept(rates, [0.0, 0.1, 0.0])
    for each in found.findings:
        assert each.summary is not None
        each.summary.rows[-1]["win_rate"] = each.summary.rows[-1]["mean_reward"]
    first, second = found.table().records()
    # t(0.975, 2) = 4.303, so 0.933 ± 4.303 · 0.115 / √3; a reward may be above 1.
    assert first["mean reward"] == "0.933 ± 0.12 [0.646, 1.22]"
    assert first["distinct-1"] == "-"
    assert first["win rate"] == "0.933 ± 0.12 [0.646, 1]"
    assert second["win rate"].endswith(" [0, 0.177]")
    written = {(row.figure, row.mean.value): row for row in found.combinations}
    assert written["win_rate", sum(rates) / 3].mean.high == 1.0
    reward, rate = found.comparisons()
    assert reward.difference is not None and rate.difference is not None
    assert reward.difference.low is not None and reward.difference.low < -1.0
    assert rate.difference.low == -1.0
    assert rate.difference.p_value == reward.difference.p_value
