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
from flows.report.swept import Finding, Sweep, write_sweep
from flows.report.table import COLUMNS
from flows.sweep import run_cells
from tests.small_disk import contents, no_room

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


def test_an_interrupt_starts_no_further_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def interrupted(config: RunConfig) -> None:
        started.append(config.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.sweep.iterate_resolved", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_cells([Cell({}, RunConfig(seed=seed)) for seed in range(3)], 1)
    assert started == [0]


def test_one_seed_or_one_combination_is_not_tested() -> None:
    assert swept([0.5], [0.9]).notes() == []
    assert Sweep("try", [finding(0.5, 0, 0.5)]).comparisons() == []


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


def test_a_sweep_without_results_has_no_plot(tmp_path: Path) -> None:
    failed = Sweep("try", [Finding(finding(0.5, 0, 0.5).cell, None, "out of memory")])
    written = write_sweep(failed, tmp_path)
    assert "plot" not in written
    assert "out of memory" in written["runs"].read_text()


def test_a_disk_without_room_leaves_the_files_of_before(tmp_path: Path) -> None:
    write_sweep(swept(ONE, TWO), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(OSError), no_room():
        write_sweep(swept(TWO, ONE), tmp_path)
    assert contents(tmp_path) == before


def test_the_interval_of_a_share_ends_where_shares_do() -> None:
    rates = [1.0, 0.8, 1.0]
    found = swept(rates, [0.0, 0.1, 0.0])
    for each in found.findings:
        assert each.summary is not None
        each.summary.rows[-1]["win_rate"] = each.summary.rows[-1]["mean_reward"]
    first, second = found.rows()
    # 0.933 ± 4.303 · 0.115 / √3; a reward may be above 1.
    assert first["mean reward"] == "0.933 ± 0.12 [0.646, 1.22]"
    assert first["win rate"] == "0.933 ± 0.12 [0.646, 1]"
    assert second["win rate"].endswith(" [0, 0.177]")
    written = {(row["figure"], row["mean"]): row for row in found.combinations()}
    assert written["win_rate", sum(rates) / 3]["high"] == 1.0
    reward, rate = found.comparisons()
    assert reward["interval"][0] < -1.0
    assert rate["interval"][0] == -1.0
    assert rate["p_value"] == reward["p_value"]
