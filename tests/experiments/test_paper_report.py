"""The paper's report: our figures over seeds next to the paper's."""

import json
from dataclasses import replace

import pytest
from scipy import stats

from experiments.paper.report import kappa_figures, write_report
from experiments.paper.tables import Findings, paper_rows, paper_tables
from experiments.study import FinishedRun, Row
from flows.pipeline.config import RunConfig
from flows.report.summary import Summary
from flows.report.table import Cell
from tests.flows.report.evaluations import figure_row

MISTRAL = "Mistral-7B-Instruct-v0.3"
FDPO, GEB = [0.50, 0.52, 0.51], [0.61, 0.60, 0.62]


def result(row, seed, suite="", **figures):
    """A finished run whose last row has these figures."""
    coefficient = row.coefficients[0] if row.coefficients else {}
    config = RunConfig.model_validate({"seed": seed, "name": f"{row.method.lower()[:3]}-{seed}"})
    # The base and the first iteration have other figures than the last, which are reported.
    others = dict.fromkeys(["mean_reward", *figures], 0.99)
    base = figure_row(0, **others)
    first = figure_row(1, **others)
    last = figure_row(2, **({"mean_reward": 0.5} | figures))
    summary = Summary(config.name, config, "store", rows=[base, first, last, figure_row(3)])
    if suite:
        summary.suites[suite] = [first, last]
    return FinishedRun(row, config, coefficient, summary)


def findings(rows, *reported, tuning=()):
    chosen = {row: row.coefficients[0] for row in rows if row.coefficients}
    return Findings("The paper's tables", rows, reported, tuning, chosen, {})


def main(method, divergence="KL", setting=MISTRAL, **fields):
    return Row("main", setting, method, divergence, "quickstart", seeds=(0, 1, 2), **fields)


@pytest.fixture
def two():
    """f-DPO and GEB-π of the paper's first model under KL, three seeds each."""
    rows = [main("f-DPO"), main("GEB-π")]
    runs = [
        result(row, seed, mean_reward=reward, win_rate=reward)
        for row, rewards in zip(rows, (FDPO, GEB), strict=True)
        for seed, reward in enumerate(rewards)
    ]
    return findings(rows, *runs)


def shown(results, method, divergence="KL"):
    """The cells of the only table's row."""
    [table] = paper_tables(results)
    [row] = [row for row in table.rows if list(row[:2]) == [method, divergence]]
    return {
        title: cell for title, cell in zip(table.header, row, strict=True) if isinstance(cell, Cell)
    }


def test_ours_stands_beside_the_paper_s(two):
    cells = shown(two, "GEB-π")
    assert cells["WR"].text == "61.00%", "percent, as in the paper"
    half = stats.t.ppf(0.975, 2) * 1.0 / 3**0.5
    assert cells["WR"].interval == f"[{61 - half:.2f}%, {61 + half:.2f}%] (paper: 81.00)"
    assert cells["AvgR"].text == "0.6100"


def test_a_missing_cell_is_a_dash_with_the_paper_s_figure(two):
    results = findings([*two.rows, main("XPO")], *two.reported)
    assert str(shown(results, "XPO")["AvgR"]) == "- (paper: 0.7492)"
    assert "pass@16" not in shown(results, "XPO"), "neither has it"
    assert paper_tables(findings(paper_rows("full"))) == []


def test_bonus_on_all_responses_has_a_table_of_its_own(two):
    row = replace(main("GEB-π"), experiment="responses")
    tables = paper_tables(findings([*two.rows, row], *two.reported, result(row, 0, win_rate=0.7)))
    titles = [table.title for table in tables]
    assert titles == [f"{MISTRAL}: main", f"{MISTRAL}: responses"]
    assert str(tables[1].rows[0][4]) == "70.00% (paper: 79.78)"


def test_differences_have_p_values_of_welch_by_holm():
    rows = [main("f-DPO"), main("GEB-π"), main("XPO"), main("VPO")]
    rewards = [FDPO, [0.58, 0.56, 0.60], [0.49, 0.50, 0.48], [0.52]]
    runs = [
        result(row, seed, mean_reward=reward)
        for row, values in zip(rows, rewards, strict=True)
        for seed, reward in enumerate(values)
    ]
    title = "AvgR − f-DPO's"
    results = findings(rows, *runs)
    # Two tests: one seed is none. The larger p-value stays as it is.
    p_value = stats.ttest_ind(rewards[2], FDPO, equal_var=False).pvalue
    cell = shown(results, "XPO")[title]
    assert cell.text == "-0.0200"
    assert cell.interval.endswith(f"], p = {p_value:.3f}, by Holm p = {p_value:.3f}")
    p_value = 2 * stats.ttest_ind(rewards[1], FDPO, equal_var=False).pvalue
    cell = shown(results, "GEB-π")[title]
    assert cell.text == "+0.0700"
    assert cell.interval.endswith(f"by Holm p = {p_value:.3f}")
    assert shown(results, "VPO")[title].text == shown(results, "f-DPO")[title].text == "-"


def test_hard_prompts_show_pass_at_16_of_suites():
    row = replace(main("f-DPO", setting="Qwen2.5-7B"), experiment="hard", seeds=(0,))
    run = result(row, 0, suite="math500", **{"pass@16": 0.5})
    cells = shown(findings([row], run), "f-DPO")
    assert str(cells["math500 pass@16"]) == "50.00% (paper: 89.80)"
    assert str(cells["aime2025 pass@16"]) == "- (paper: 23.23)"


def test_kappa_is_drawn_from_tuning_runs_on_rejected_responses():
    low, high = (main("GEB-π", coefficients=[{"train.kappa": value}]) for value in (0.1, 1))
    everywhere = replace(high, experiment="responses")
    tuning = (
        result(high, 7, mean_reward=0.9),
        result(low, 7, mean_reward=0.7),
        # The same run, for another row.
        result(replace(low, experiment="kappa"), 7, mean_reward=0.7),
        result(everywhere, 7, mean_reward=0.1),
        # Zero has no logarithm.
        result(main("GEB-π", coefficients=[{"train.kappa": 0}]), 7, mean_reward=0.2),
    )
    [(title, figure)] = kappa_figures(findings([low], tuning=tuning)).items()
    assert title == f"{MISTRAL}, KL"
    [line] = figure.axes[0].lines
    assert figure.axes[0].get_legend_handles_labels()[1] == ["GEB-π"]
    assert list(line.get_xdata()) == [-1, 0]
    assert list(line.get_ydata()) == pytest.approx([0.7, 0.9])
    assert kappa_figures(findings([low])) == {}


def test_the_report_says_how_much_is_computed(two, store, tmp_path):
    document, text = write_report(
        store, "paper-full", findings([*two.rows, main("XPO")], *two.reported)
    )
    folder = tmp_path / "store/runs/paper-full"
    assert document["page"] == str(folder / "report.md")
    assert (folder / "report.md").read_text() == text
    assert "6 runs of 3 rows are finished" in text
    assert [row["seeds"] for row in document["tables"][0]["rows"]] == ["3 of 3", "3 of 3", "0 of 3"]
    assert f"## {MISTRAL}: main" in text
    assert len(json.loads((folder / "report.json").read_text())["reported"]) == 6


def test_the_interval_of_a_share_ends_at_0_and_100():
    row = main("GEB-π")
    runs = [
        result(row, seed, win_rate=rate, mean_reward=rate)
        for seed, rate in enumerate([1.0, 0.8, 1.0])
    ]
    cells = shown(findings([row], *runs), "GEB-π")
    assert cells["WR"].interval.startswith("[64.65%, 100.00%]")
    assert cells["AvgR"].interval.startswith("[0.6465, 1.2202]"), "a reward is not a share"
