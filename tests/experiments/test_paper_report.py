"""The paper's report: every table in its order, and our figures next to the paper's."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from experiments.paper.report import kappa_figures, write_report
from experiments.paper.tables import Findings, PaperFigure, PaperTable, paper_rows, paper_tables
from experiments.study import Row, StudyRun
from flows.pipeline.config import RunConfig
from flows.pipeline.grid import Cell
from flows.report.summary import Summary
from flows.report.table import COLUMNS
from stages.store.base import Store
from stages.tables.schemas import RESPONSES, write_table
from tests.flows.evaluations import artifact_in
from tests.stage_calls import response

MISTRAL = "Mistral-7B-Instruct-v0.3"
FDPO, GEB = [0.50, 0.52, 0.51], [0.61, 0.60, 0.62]


def result(row: Row, seed: int, tunes: bool = False, suite: str = "", **figures: Any) -> StudyRun:
    """A finished run whose last row has these figures."""
    coefficient = {name: values[0] for name, values in row.grid.items()}
    config = RunConfig.model_validate({"seed": seed, "name": f"{row.method.lower()[:3]}-{seed}"})
    base: dict[str, Any] = {column.name: None for column in COLUMNS}
    base |= {"iteration": 0}
    # The base and the first iteration have other figures than the last, which are reported.
    others = dict.fromkeys(figures, 0.99)
    first = base | {"iteration": 1, "mean_reward": 0.99} | others
    last = base | {"iteration": 2, "mean_reward": 0.5} | figures
    unevaluated = base | {"iteration": 3}
    summary = Summary(config.name, config, "store", rows=[base | others, first, last, unevaluated])
    if suite:
        summary.suites[suite] = [first, last]
    return StudyRun(row, Cell({}, config), coefficient, tunes, summary)


def findings(rows: list[Row], *reported: StudyRun, tuning: tuple[StudyRun, ...] = ()) -> Findings:
    chosen = {row: row.coefficients()[0] for row in rows if row.grid}
    return Findings("full", rows, reported, tuning, chosen, {})


def main(method: str, divergence: str = "KL", setting: str = MISTRAL, **fields: Any) -> Row:
    return Row("main", setting, method, divergence, "quickstart", seeds=(0, 1, 2), **fields)


@pytest.fixture
def two() -> Findings:
    """f-DPO and GEB-π of the paper's first model under KL, three seeds each."""
    rows = [main("f-DPO"), main("GEB-π")]
    runs = [
        result(row, seed, mean_reward=reward, win_rate=reward)
        for row, rewards in zip(rows, (FDPO, GEB), strict=True)
        for seed, reward in enumerate(rewards)
    ]
    return findings(rows, *runs)


def table(found: Findings, name: str, setting: str = MISTRAL) -> PaperTable:
    [paper] = [
        paper_table
        for paper_table in paper_tables(found)
        if paper_table.name.startswith(f"{name}-") and paper_table.setting == setting
    ]
    return paper


def figures(found: PaperTable, method: str) -> dict[str, PaperFigure]:
    return dict(zip(found.header[1:], found.figures()[method], strict=True))


def test_alpaca_s_column_is_the_length_controlled_win_rate() -> None:
    row = main("GEB-π")
    run = result(row, 0, suite="alpaca_eval", win_rate=0.5, length_controlled_win_rate=0.31)
    shown = figures(table(findings([row], run), "out-of-domain"), "GEB-π")
    assert shown["KL Alpaca"].text == "31.00"


def test_ours_stands_beside_the_paper_s(two: Findings) -> None:
    shown = figures(table(two, "in-domain"), "GEB-π")
    assert shown["KL WR"].text == "61.00", "percent, as in the paper"
    assert shown["KL WR"].paper == "81.00"
    half = stats.t.ppf(0.975, 2) * 1.0 / 3**0.5
    assert shown["KL WR"].interval == f"[{61 - half:.2f}, {61 + half:.2f}]"
    assert shown["KL AvgR"].text == "0.6100"


def test_a_missing_cell_is_a_dash_with_the_paper_s_figure(two: Findings) -> None:
    shown = table(two, "in-domain")
    hellinger = figures(shown, "GEB-π")["Hellinger WR"]
    assert (hellinger.text, hellinger.interval, hellinger.paper) == ("–", "", "75.48")
    assert str(hellinger) == "– (paper: 75.48)"
    assert figures(shown, "GEB-π")["average WR"].text == "–", "of three divergences one is there"
    assert figures(shown, "XPO")["KL AvgR"].paper == "0.7492", "a method without any run"
    assert not table(two, "in-domain", "LLaMA-3-8B-SFT").computed


def test_tables_are_in_the_paper_s_order(two: Findings) -> None:
    titles = dict.fromkeys(paper_table.title.split(" · ")[0] for paper_table in paper_tables(two))
    assert list(titles) == [f"Table {number}" for number in range(3, 11)]


def test_repeats_have_deviations_and_p_values_are_welch_s(two: Findings) -> None:
    repeats = figures(table(two, "repeats"), "f-DPO")
    assert repeats["KL AvgR"].text == "0.5100 ± 0.0100 (n = 3)"
    assert repeats["KL AvgR"].paper == "0.7426 ± 0.0201"
    tested = table(two, "p-values")
    assert "f-DPO" not in tested.figures()
    p_value = stats.ttest_ind(GEB, FDPO, equal_var=False).pvalue
    assert p_value < 0.001
    assert figures(tested, "GEB-π")["KL AvgR"].text == "+0.1000"
    assert figures(tested, "GEB-π")["KL WR"].paper == "0.003"


def test_p_values_are_adjusted_over_the_methods_of_a_setting() -> None:
    rows = [main("f-DPO"), main("GEB-π"), main("XPO"), main("VPO")]
    rewards = [FDPO, [0.58, 0.56, 0.60], [0.49, 0.50, 0.48], [0.52]]
    runs = [
        result(row, seed, mean_reward=reward)
        for row, values in zip(rows, rewards, strict=True)
        for seed, reward in enumerate(values)
    ]
    tested = table(findings(rows, *runs), "p-values")
    # Two tests: one seed is none. The larger p-value stays as it is.
    p_value = stats.ttest_ind(rewards[2], FDPO, equal_var=False).pvalue
    shown = figures(tested, "XPO")["KL AvgR"]
    assert shown.interval.endswith(f"], p = {p_value:.3f}, by Holm p = {p_value:.3f}")
    p_value = 2 * stats.ttest_ind(rewards[1], FDPO, equal_var=False).pvalue
    assert figures(tested, "GEB-π")["KL AvgR"].interval.endswith(f"by Holm p = {p_value:.3f}")
    assert figures(tested, "VPO")["KL AvgR"].text == "–"


def test_hard_prompts_show_the_suites_of_the_runs() -> None:
    row = Row("hard", "Qwen2.5-7B", "f-DPO", "KL", "math-fdpo", seeds=(0,))
    run = result(row, 0, suite="math500", **{"pass@16": 0.5})
    config = run.cell.config.model_copy(update={"suites": {"math500": None}})
    run = replace(run, cell=Cell({}, config))
    shown = figures(table(findings([row], run), "hard", "Qwen2.5-7B"), "f-DPO")
    assert str(shown["math500"]) == "50.00 (paper: 89.80)"
    assert str(shown["aime2025"]) == "– (paper: 23.23)"
    assert str(shown["average"]) == "– (paper: 56.94)", "one of its three is not computed"


def test_the_average_of_hard_prompts_is_over_the_three_suites() -> None:
    row = Row("hard", "Qwen2.5-7B", "f-DPO", "KL", "math-fdpo", seeds=(0,))
    run = result(row, 0, suite="math500", **{"pass@16": 0.5})
    assert run.summary is not None
    for name, solved in (("aime2025", 0.2), ("olympiadbench", 0.3)):
        other = result(row, 0, suite=name, **{"pass@16": solved})
        assert other.summary is not None
        run.summary.suites |= other.summary.suites
    shown = figures(table(findings([row], run), "hard", "Qwen2.5-7B"), "f-DPO")
    assert str(shown["average"]) == "33.33 (paper: 56.94)"
    tested = [paper_table.name for paper_table in paper_tables(findings([row], run))]
    assert "p-values-qwen2-5-7b" not in tested, "one seed allows no test"


def test_bonus_on_all_responses_stands_beside_the_main_cell() -> None:
    rows = [main("GEB-π"), Row("responses", MISTRAL, "GEB-π", "KL", "quickstart", seeds=(0,))]
    runs = [result(row, 0, win_rate=rate) for row, rate in zip(rows, (0.8, 0.7), strict=True)]
    shown = figures(table(findings(rows, *runs), "responses"), "GEB-π")
    assert str(shown["KL WR, all"]) == "70.00 (paper: 79.78)"
    assert str(shown["KL WR, rejected only"]) == "80.00 (paper: 81.00)"


def test_kappa_is_drawn_from_tuning_runs_on_rejected_responses() -> None:
    low, high = (main("GEB-π", grid={"train.kappa": [value]}) for value in (0.1, 1))
    everywhere = replace(high, experiment="responses")
    tuning = (
        result(low, 7, tunes=True, mean_reward=0.6),
        result(low, 8, tunes=True, mean_reward=0.8),
        result(high, 7, tunes=True, mean_reward=0.9),
        result(everywhere, 7, tunes=True, mean_reward=0.1),
    )
    [(name, figure)] = kappa_figures(findings([low], tuning=tuning)).items()
    assert name == f"kappa-{MISTRAL.lower().replace('.', '-')}-kl"
    [line] = figure.axes[0].lines
    assert figure.axes[0].get_legend_handles_labels()[1] == ["GEB-π"]
    assert list(line.get_xdata()) == [-1, 0]
    assert list(line.get_ydata()) == pytest.approx([0.7, 0.9])
    assert kappa_figures(findings([low])) == {}


def test_the_report_says_how_much_is_computed(two: Findings, store: Store, tmp_path: Path) -> None:
    write_report(store, "paper-full", two)
    folder = tmp_path / "store/runs/paper-full"
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert "2 of 2 cells are computed whole, 0 in part; 6 runs are finished" in page
    assert "geb paper --scale full" in text
    # Its own tables alone: what is not computed here is not copied from the paper.
    assert "### Mistral-7B-Instruct-v0.3" in text
    assert "LLaMA" not in text
    assert "paper 71.61" in page, "the page has the paper's tables whole"
    document = json.loads((folder / "report.json").read_text())
    assert len(document["runs"]) == 6


def test_a_copy_of_the_report_has_the_figures_that_it_shows(store: Store, tmp_path: Path) -> None:
    low, high = (main("GEB-1/π", grid={"train.kappa": [value]}) for value in (0.1, 1))
    tuning = (result(low, 7, tunes=True), result(high, 7, tunes=True, mean_reward=0.9))
    written = write_report(store, "paper-full", findings([low], tuning=tuning))
    written.copy_to(tmp_path / "docs" / "results")
    text = (tmp_path / "docs/results/report.md").read_text()
    [shown] = re.findall(r"!\[Figure 3 · .*\]\((.+)\)", text)
    assert (tmp_path / "docs/results" / shown).read_bytes().startswith(b"\x89PNG")


def test_nothing_computed_is_said(store: Store, tmp_path: Path) -> None:
    write_report(store, "paper-small", findings(paper_rows("small")))
    page = (tmp_path / "store/runs/paper-small/report.html").read_text()
    assert "0 of " in page


def test_the_interval_of_a_share_ends_at_0_and_100() -> None:
    row = main("GEB-π")
    runs = [
        result(row, seed, win_rate=rate, mean_reward=rate, distinct_1=rate)
        for seed, rate in enumerate([1.0, 0.8, 1.0])
    ]
    results = findings([row], *runs)
    shown = figures(table(results, "in-domain"), "GEB-π")
    assert shown["KL WR"].interval == "[64.65, 100.00]"
    assert shown["KL AvgR"].interval == "[0.6465, 1.2202]", "a reward is not a share"
    shown = figures(table(results, "distinct"), "GEB-π")
    assert shown["KL held-out dist-1"].interval == "[0.6465, 1.0000]"


def test_distinct_n_counts_the_last_iteration_s_training_responses(tmp_path: Path) -> None:
    row = main("GEB-π")
    run = result(row, 0, distinct_1=0.9)
    assert run.summary is not None
    sampled = {
        "iteration-1/generate/0": "a a a a",
        "iteration-3/generate/0": "a b",
        "iteration-3/generate/1": "a c",
        "iteration-3/evaluate/generate/0": "d d d d",
    }
    for step, text in sampled.items():
        folder = tmp_path / step
        folder.mkdir(parents=True)
        write_table(folder / "responses.parquet", RESPONSES, [response("q", 0, text)])
        run.summary.artifacts[step] = artifact_in(folder)
    shown = figures(table(findings([row], run), "distinct"), "GEB-π")
    # Words a, b and c of four; "a b" and "a c" of two.
    assert [shown[f"KL dist-{n}"].text for n in (1, 2, 3)] == ["0.7500", "1.0000", "–"]
    assert shown["KL held-out dist-1"].text == "0.9000"
