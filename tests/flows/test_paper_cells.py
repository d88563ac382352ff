"""Tables of the paper's cells: complete, readable, and planned with what they share."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from flows.pipeline.paper_cells import (
    BANDIT,
    SCALES,
    by_name,
    choose,
    read_rows,
    reported_runs,
    tuning_runs,
)
from flows.pipeline.presets import configured
from flows.planning.budget import budget
from flows.planning.paper_budget import paper_budget
from flows.report.paper_values import published
from stages.contract.errors import UserError
from tests.flows.loop import geb

HEAD = "experiment,setting,method,divergence,configuration,fields,grid,tuning_seeds,seeds"
FDPO = "main,front desk,f-DPO,KL,quickstart,train.design=none,,,0 1"
GEB = 'main,front desk,GEB-π,KL,quickstart,,"train.kappa=0.5,2",7 8,0 1'


def table(folder: Path, *rows: str) -> Path:
    (folder / "small.csv").write_text("\n".join([HEAD, *rows]) + "\n", encoding="utf-8")
    return folder


def test_the_full_table_has_every_cell_of_the_paper() -> None:
    rows = read_rows("full")
    counted = Counter(row.experiment for row in rows)
    # Two models; f-DPO, FEB and three designs under three divergences, three baselines under KL.
    assert counted["main"] == 2 * (5 * 3 + 3)
    # Three designs under three divergences.
    assert counted["kappa"] == counted["responses"] == 9
    assert counted["hard"] == 4
    assert counted[BANDIT] == 1
    repeated = [row for row in rows if row.experiment == "main" and len(row.seeds) == 5]
    assert {row.method for row in repeated} == {"f-DPO", "GEB-π", "GEB-1/π", "GEB-arctanh"}


def test_what_the_paper_figures_has_a_cell() -> None:
    cells = {row.names() for row in read_rows("full")}
    experiments = {"in-domain": "main", "out-of-domain": "main", "repeats": "main"}
    experiments |= {"p-values": "main", "hard": "hard", "responses": "responses"}
    for each in published():
        assert float(each.value) >= 0
        if each.table in experiments and each.divergence != "average":
            wanted = experiments[each.table], each.setting, each.method, each.divergence
            assert wanted in cells, each


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_has_a_configuration_whose_objective_is_that_of_its_name(scale: str) -> None:
    designs = {"f-DPO": "none", "GEB-π": "one_minus_pi", "GEB-1/π": "inverse_pi"}
    designs |= {"GEB-arctanh": "arctanh"}
    divergences = {"KL": "reverse_kl", "Hellinger": "hellinger", "forward KL": "forward_kl"}
    rows = read_rows(scale)
    first = {row: row.coefficients()[0] for row in rows if row.grid}
    runs = [*tuning_runs(rows, {}), *reported_runs(rows, {}, first)]
    assert {each.row for each in runs} == {row for row in rows if row.experiment != BANDIT}
    for each in by_name(runs).values():
        method = each.row.method.removesuffix(", token")
        train = each.cell.config.train
        assert train.design == designs.get(method, method.lower())
        assert train.divergence == divergences[each.row.divergence]


def test_runs_that_are_reported_have_other_seeds_than_those_that_tune() -> None:
    tries: dict[str, set[int]] = {}
    for row in read_rows("small"):
        assert not set(row.seeds) & set(row.tuning_seeds)
        if row.experiment != BANDIT:
            tries.setdefault(row.setting, set()).add(
                len(row.coefficients() * len(row.tuning_seeds))
            )
    # As many for each method, whatever its coefficient is.
    assert tries == {"front desk": {4}, "long answers": {4}, "hard sums": {4}}


def test_one_run_serves_all_cells_that_ask_for_it(tmp_path: Path) -> None:
    twice = FDPO.replace("main", "responses")
    rows = read_rows("small", folder=table(tmp_path, FDPO, twice))
    runs = reported_runs(rows, {}, {})
    assert len(runs) == 4
    assert len(by_name(runs)) == 2


def test_a_part_is_named_by_what_its_cells_have(tmp_path: Path) -> None:
    folder = table(tmp_path, FDPO, GEB, FDPO.replace("KL", "Hellinger"))
    assert [row.method for row in read_rows("small", ["GEB-π"], folder)] == ["GEB-π"]
    two = read_rows("small", ["f-DPO", "GEB-π", "KL"], folder)
    assert [row.names()[2:] for row in two] == [("f-DPO", "KL"), ("GEB-π", "KL")]
    with pytest.raises(UserError, match="no cell has 'PPO'") as refused:
        read_rows("small", ["PPO"], folder)
    assert "GEB-π" in str(refused.value.remedy)
    with pytest.raises(UserError, match="no cell has 'GEB-π' and 'Hellinger' at once"):
        read_rows("small", ["GEB-π", "Hellinger"], folder)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (FDPO.replace("0 1", "one"), "small.csv:2 is no cell"),
        (FDPO.replace("train.design=none", "none"), "'none' is not FIELD=VALUE"),
        (GEB.replace("7 8", ""), "a grid needs tuning seeds"),
    ],
)
def test_a_row_that_is_no_cell_is_named_by_its_line(tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_rows("small", folder=table(tmp_path, row))


def test_the_coefficient_is_that_with_the_highest_mean_over_tuning_seeds(tmp_path: Path) -> None:
    [row] = read_rows("small", folder=table(tmp_path, GEB))
    runs = tuning_runs([row], {})
    assert [each.cell.config.seed for each in runs] == [7, 8, 7, 8]
    assert {each.cell.config.train.kappa for each in runs} == {0.5, 2}
    low, high = [each.name for each in runs[:2]], [each.name for each in runs[2:]]
    rewards = dict(zip([*low, *high], [0.9, 0.1, 0.6, 0.6], strict=True))
    assert choose(runs, rewards) == {row: {"train.kappa": 2}}
    # Of values that are as good the first.
    assert choose(runs, dict.fromkeys(rewards, 0.5)) == {row: {"train.kappa": 0.5}}
    assert choose(runs, {}) == {}
    assert reported_runs([row], {}, {}) == [], "nothing is reported before its coefficient is known"
    [first, _] = reported_runs([row], {}, {row: {"train.kappa": 2}})
    assert (first.cell.config.train.kappa, first.cell.config.seed) == (2, 0)


def test_fewer_seeds_are_the_first_ones(tmp_path: Path) -> None:
    [row] = read_rows("small", folder=table(tmp_path, GEB))
    assert [each.cell.config.seed for each in tuning_runs([row], {}, 1)] == [7, 7]


def test_steps_before_the_first_training_are_shared_by_methods(tmp_path: Path) -> None:
    fields = {"store": str(tmp_path / "store"), "iterations": 2}
    plain = configured("quickstart", fields | {"name": "one", "train": {"design": "none"}})
    bonus = configured("quickstart", fields | {"name": "two"})
    other = configured("quickstart", fields | {"name": "three", "seed": 1})
    found = budget([plain, bonus, other])
    # prepare, sft; the base's samples and scores, held-out and of iteration 1; its pairs.
    assert len(found.shared("one")) == len(found.shared("two")) == 7
    assert found.shared("three") == []
    kinds = sorted(found.steps[each].cost.step for each in found.shared("one"))
    assert kinds == [
        *("base/generate/0", "base/score/0", "iteration-1/generate/0", "iteration-1/pair"),
        *("iteration-1/score/0", "prepare", "sft"),
    ]
    whole = sum(len(each) for each in found.of_run.values())
    assert len(found.steps) == whole - 7
    assert found.tokens(found.steps) < sum(found.tokens(each) for each in found.of_run.values())
    assert found.seconds(2) < found.seconds(1)


def test_the_budget_lists_tuning_and_reported_runs_of_a_cell(tmp_path: Path) -> None:
    folder = table(tmp_path, FDPO, GEB)
    rows = read_rows("small", folder=folder)
    found = paper_budget(rows, {"store": str(tmp_path / "store")})
    shown = [(each.row.method, each.fields(), each.seeds()) for each in found.cells]
    assert shown == [
        ("f-DPO", "train.design=none", "0 1"),
        ("GEB-π", "train.kappa=0.5", "7 8 (tuning)"),
        ("GEB-π", "train.kappa=2", "7 8 (tuning)"),
        ("GEB-π", "train.kappa=chosen", "0 1"),
    ]
    assert found.lines(1)[0].startswith("8 runs of 2 cells: ")


def test_the_bandit_alone_has_no_runs_and_the_store_that_is_named(tmp_path: Path) -> None:
    found = paper_budget(read_rows("small", [BANDIT]), {"store": str(tmp_path)})
    assert [each.row.experiment for each in found.cells] == [BANDIT]
    assert found.store == str(tmp_path)
    assert found.lines(1)[0].startswith("0 runs of 1 cells")


def test_a_dry_run_of_the_paper_needs_no_hub(tmp_path: Path) -> None:
    done = geb(
        *("paper", "--scale", "full", "--dry-run", "--json", "--store", tmp_path / "store"),
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hub_asked"] is False
    cells: list[dict[str, object]] = found["cells"]
    assert {each["configuration"] for each in cells} == {
        row.configuration for row in read_rows("full")
    }
    assert all(each["tokens"] for each in cells if each["runs"])
    assert found["gpu_hours"] > 1000
    assert found["different_steps"] < found["steps"]
