"""Tables of the paper's rows: complete, readable, and planned with what they share."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from experiments.paper.tables import COLUMNS, paper_rows, published
from experiments.study import (
    TUNING_SEED,
    FinishedRun,
    choose,
    finished,
    read_rows,
    reported_runs,
    selected,
    tuning_runs,
)
from flows.pipeline.loading import with_fields
from flows.pipeline.presets import configured
from flows.report.summary import Summary
from stages.contract.errors import UserError
from tests.flows.loop import geb_json
from tests.flows.report.evaluations import figure_row

HEAD = "experiment,setting,method,divergence,configuration,fields,grid,seeds"
FDPO = "main,front desk,f-DPO,KL,quickstart,train.design=none,,0 1"
GEB = 'main,front desk,GEB-π,KL,quickstart,,"train.kappa=0.5,2",0 1'


def table(folder, *rows):
    place = folder / "small.csv"
    place.write_text("\n".join([HEAD, *rows]) + "\n", encoding="utf-8")
    return place


def test_the_full_table_has_every_cell_of_the_paper():
    rows = paper_rows("full")
    counted = Counter(row.experiment for row in rows)
    # Two models; f-DPO, FEB and three designs under three divergences, three baselines under KL.
    assert counted["main"] == 2 * (5 * 3 + 3)
    # Three designs under three divergences.
    assert counted["kappa"] == counted["responses"] == 9
    assert counted["hard"] == 4
    repeated = [row for row in rows if row.experiment == "main" and len(row.seeds) == 5]
    assert {row.method for row in repeated} == {"f-DPO", "GEB-π", "GEB-1/π", "GEB-arctanh"}


def test_kappa_is_the_best_of_the_papers_grid():
    grid = [1, 1e-2, 1e-4, 1e-6, 1e-8]
    for row in paper_rows("full"):
        geb = row.method.startswith("GEB") and row.experiment != "hard"
        other = row.method == "VPO" or (row.method == "FEB" and row.divergence != "KL")
        values = [float(coefficient["train.kappa"]) for coefficient in row.coefficients]
        assert sorted(values, reverse=True) == (grid if geb or other else [])
        assert dict(row.fields).get("train.target_ratio", "own") == (None if geb else "own")


def test_what_the_paper_figures_has_a_cell_and_a_column():
    names_of_rows = {row.names for row in paper_rows("full")}
    for (*names, title), value in published().items():
        assert float(value) >= 0
        assert tuple(names) in names_of_rows
        assert title in COLUMNS


@pytest.mark.parametrize("scale", ["small", "chat", pytest.param("full", marks=pytest.mark.slow)])
def test_every_cell_configures_the_objective_that_it_names(scale):
    designs = {"f-DPO": "none", "GEB-π": "one_minus_pi", "GEB-1/π": "inverse_pi"}
    designs |= {"GEB-arctanh": "arctanh", "SE-POPO": "se_popo", "iterative RPO": "none"}
    designs |= {"SELM": "xpo", "VPO": "xpo"} if scale == "chat" else {}
    losses = {"IPO": "ipo"}
    designs |= dict.fromkeys(losses, "none")
    divergences = {"KL": "reverse_kl", "Hellinger": "hellinger", "forward KL": "forward_kl"}
    # Seeds and coefficients change no objective.
    rows = []
    for row in paper_rows(scale):
        rows.append(replace(row, coefficients=row.coefficients[:1], seeds=row.seeds[:1]))
    first = {row: row.coefficients[0] for row in rows if row.coefficients}
    runs = [*tuning_runs(rows, {}), *reported_runs(rows, {}, first)]
    assert {run.row for run in runs} == set(rows)
    for run in runs:
        method = run.row.method.removesuffix(", token")
        train = run.config.train
        is_plain = scale != "small" and (method, run.row.divergence) == ("FEB", "KL")
        assert train.design == ("none" if is_plain else designs.get(method, method.lower()))
        assert train.loss == losses.get(method, "sigmoid")
        assert train.divergence == divergences[run.row.divergence]


def test_reported_and_tuning_runs_share_no_seed():
    tries = {}
    for row in (*paper_rows("small"), *paper_rows("chat")):
        assert TUNING_SEED not in row.seeds
        tries.setdefault(row.setting, set()).add(len(row.coefficients))
    # As many for each method, whatever its coefficient is.
    small = {"front desk": {4}, "long answers": {4}, "hard sums": {4}}
    assert tries == {**small, "rules": {3}, "every rule": {3}}


def test_one_run_serves_all_cells_that_ask_for_it(tmp_path):
    twice = FDPO.replace("main", "responses")
    rows = read_rows(table(tmp_path, FDPO, twice))
    runs = reported_runs(rows, {}, {})
    assert len(runs) == 4
    assert len({run.config.name for run in runs}) == 2


def test_a_part_is_named_by_what_its_cells_have(tmp_path):
    rows = read_rows(table(tmp_path, FDPO, GEB, FDPO.replace("KL", "Hellinger")))
    assert [row.method for row in selected(rows, ["GEB-π"])] == ["GEB-π"]
    two = selected(rows, ["GEB-π", "f-DPO", "KL"])
    assert [row.names[2:] for row in two] == [("f-DPO", "KL"), ("GEB-π", "KL")]
    [one] = selected(rows, ["f-DPO", "Hellinger"])
    assert one.names[2:] == ("f-DPO", "Hellinger")
    assert selected(rows, []) == rows
    with pytest.raises(UserError, match="no row has PPO") as refused:
        selected(rows, ["f-DPO", "PPO"])
    assert "GEB-π" in str(refused.value.remedy)
    with pytest.raises(UserError, match="no row has GEB-π and Hellinger"):
        selected(rows, ["GEB-π", "Hellinger"])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (FDPO.replace("0 1", "one"), "small.csv:2 is not a row"),
        (FDPO.replace("train.design=none", "none"), "'none' is not FIELD=VALUE"),
        (GEB.replace("0 1", "0 100"), "seed 100"),
    ],
)
def test_a_broken_row_is_named_by_its_line(tmp_path, row, said):
    with pytest.raises(UserError, match=said):
        read_rows(table(tmp_path, row))


def test_a_column_without_a_field_is_refused_by_its_name(tmp_path):
    place = table(tmp_path, FDPO)
    place.write_text(place.read_text().replace("grid", "grid,tuning_seeds").replace(",,", ",,,"))
    with pytest.raises(UserError, match="tuning_seeds"):
        read_rows(place)


def test_runs_of_two_studies_have_different_names(tmp_path):
    [row] = read_rows(table(tmp_path, FDPO), "paper")
    [run, _] = reported_runs([row], {}, {})
    [other, _] = reported_runs([replace(row, prefix="rehearsal")], {}, {})
    assert run.config.name == "paper-quickstart-design_none-s0"
    assert other.config.name == "rehearsal-quickstart-design_none-s0"


def test_a_store_that_cannot_be_opened_is_not_taken_for_an_empty_one(tmp_path):
    [row] = read_rows(table(tmp_path, FDPO))
    with pytest.raises(UserError, match="nowhere"):
        finished(reported_runs([row], {"store": "nowhere://bucket/place"}, {}))


def measured(run, reward):
    """A run with a mean reward after its only iteration."""
    rows = [figure_row(0, mean_reward=0.99), figure_row(1, mean_reward=reward)]
    summary = Summary(run.config.name, run.config, "store", rows=rows)
    return FinishedRun(run.row, run.config, run.coefficient, summary)


def test_the_coefficient_has_the_highest_mean_reward(tmp_path):
    [row] = read_rows(table(tmp_path, GEB))
    runs = tuning_runs([row], {})
    assert [run.config.seed for run in runs] == [TUNING_SEED] * 2
    low, high = runs
    assert (low.config.train.kappa, high.config.train.kappa) == (0.5, 2)
    assert choose([measured(low, 0.5), measured(high, 0.6)]) == {row: {"train.kappa": 2}}
    assert choose([measured(low, 0.5), measured(high, 0.4)]) == {row: {"train.kappa": 0.5}}
    # The first of values that are as good.
    assert choose([measured(run, 0.5) for run in runs]) == {row: {"train.kappa": 0.5}}
    assert choose([measured(low, math.nan), measured(high, 0.4)]) == {row: {"train.kappa": 2}}
    assert choose([]) == {}
    assert reported_runs([row], {}, {}) == [], "nothing is reported before its coefficient is known"
    [first, _] = reported_runs([row], {}, {row: {"train.kappa": 2}})
    assert (first.config.train.kappa, first.config.seed) == (2, 0)


@pytest.mark.parametrize("scale", ["small", "chat", "full"])
def test_a_tie_keeps_the_value_of_the_preset(scale):
    presets = {row.configuration: configured(row.configuration, {}) for row in paper_rows(scale)}
    for row in paper_rows(scale):
        preset = with_fields(presets[row.configuration], row.fields, "the row").to_values()
        same = [
            coefficient
            for coefficient in row.coefficients
            if changed(preset["train"], coefficient) == preset["train"]
        ]
        assert not same or same[0] == row.coefficients[0], row.names


def changed(train, coefficient):
    """Settings of a training with a coefficient."""
    [(name, value)] = coefficient.items()
    return train | {name.removeprefix("train."): value}


def test_a_dry_run_lists_the_runs_and_needs_no_hub():
    hard = ("--scale", "full", "--only", "hard")
    planned = geb_json("paper", *hard, "--dry-run", HF_HUB_OFFLINE="1")["runs"]
    assert len(planned) == len(set(planned))
    for row in selected(paper_rows("full"), ["hard"]):
        assert any(row.configuration in run for run in planned)
