"""Figures of a run with their intervals, and differences of two runs, from samples by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from flows.pipeline.config import Evaluation, RunConfig
from flows.report.prompt_figures import Samples, estimates, means
from flows.report.rows import adjusted, compared
from flows.report.statistics import proportion, ratio_of_sums
from flows.report.summary import Summary, iteration_row
from flows.report.table import COLUMNS
from stages.contract.errors import UserError
from tests.flows.evaluations import write_evaluation, write_scores

POLICY = {"a": [1.0, 1.0], "b": [1.0, 0.0], "c": [0.0, 0.0], "d": [0.5, None]}
BASE = {"a": [0.0, 1.0], "b": [0.0, 1.0], "c": [1.0, 0.0], "d": [0.0, 0.0]}


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    write_evaluation(tmp_path / "evaluate", POLICY, BASE)
    return tmp_path / "evaluate/distributions.parquet"


def test_figures_are_those_of_each_prompt(evaluated: Path) -> None:
    found = Samples("policy", evaluated).figures()
    assert means(found["mean_reward"]) == {"a": 1.0, "b": 0.5, "c": 0.0}, "d lacks a score"
    assert means(found["win_rate"]) == {"a": 1.0, "b": 0.0, "c": 0.0}, "ties lose"
    assert means(found["mean_log_pi_ref"]) == {"a": -10.0, "b": -5.0, "c": 0.0, "d": -5.0}
    assert means(found["mean_response_tokens"]) == dict.fromkeys("abcd", 5.0)
    base = Samples("base", evaluated).figures()
    assert means(base["mean_reward"]) == {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.0}
    assert "win_rate" not in base


def test_solved_problems_are_counted_where_it_is_known_what_is_correct(evaluated: Path) -> None:
    found = Samples("policy", evaluated, (), 0.9, (1, 2)).figures()
    assert means(found["accuracy"]) == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert means(found["pass@1"]) == means(found["accuracy"])
    assert means(found["pass@2"]) == {"a": 1.0, "b": 1.0, "c": 0.0}
    assert not {"accuracy", "pass@1"} & Samples("policy", evaluated).figures().keys()


def test_intervals_are_bootstraps_over_prompts_and_wilson_s(evaluated: Path) -> None:
    found = estimates(Samples("policy", evaluated))
    assert found["mean_reward"] == ratio_of_sums(np.array([2.0, 1.0, 0.0]), np.full(3, 2.0))
    assert found["win_rate"] == proportion(1, 3)


def test_components_of_the_oracle_have_intervals_where_all_shards_are_there(tmp_path: Path) -> None:
    run = {
        "evaluate": write_evaluation(tmp_path / "evaluate", POLICY, BASE),
        "own/score/0": write_scores(tmp_path / "0", {"a": [{"style": 1.0}, {"style": 0.0}]}),
        "own/score/1": write_scores(tmp_path / "1", {"b": [{"style": 1.0, "order": 0.25}]}),
    }
    two = Evaluation(num_shards=2)
    whole = Samples.of(run, two, "evaluate", "own", "policy").figures()
    assert means(whole["components.style"]) == {"a": 0.5, "b": 1.0}
    assert whole["components.style"] == {"a": (1.0, 2), "b": (1.0, 1)}
    assert means(whole["components.order"]) == {"b": 0.25}
    del run["own/score/1"]
    part = Samples.of(run, two, "evaluate", "own", "policy").figures()
    assert not any(name.startswith("components") for name in part)


def summary(folder: Path, policy: Any, **evaluation: Any) -> Summary:
    """A run of one iteration whose evaluation is written by hand."""
    metrics = {"mean_reward": 0.5, "win_rate": 1 / 3, "tied_prompts": 1, "base_mean_reward": 0.5}
    artifacts = {"iteration-1/evaluate": write_evaluation(folder, policy, BASE, metrics)}
    config = RunConfig.model_validate({"iterations": 1, "evaluation": evaluation})
    found = Summary(folder.name, config, "store", artifacts=artifacts)
    found.rows += [iteration_row(found, 0), iteration_row(found, 1)]
    return found


def test_the_run_s_table_shows_intervals_ties_and_solved_problems(tmp_path: Path) -> None:
    found = summary(tmp_path / "run", POLICY, num_samples=2, correct_from=1.0, pass_at_k=(2,))
    base, row = found.table().records()
    first, others = COLUMNS[:2], COLUMNS[2:]
    explained = [*(each.title for each in first), "accuracy", "pass@2"]
    assert list(row) == ["iteration", *explained, *(each.title for each in others)]
    assert (row["iteration"], base["iteration"]) == ("1", "base")
    assert (row["win rate"], base["win rate"]) == ("0.333 [0.061, 0.792]", "-")
    assert row["tied"] == "1"
    assert row["pass@2"].startswith("0.667 [")
    assert base["accuracy"].startswith("0.375 [")
    low, high = found.rows[1]["intervals"]["mean_reward"]
    assert low < 0.5 < high
    console = Console(width=300)
    with console.capture() as shown:
        console.print(*found.tables())
    assert "[0.061, 0.792]" in shown.get()


def test_runs_differ_by_what_their_shared_prompts_say(tmp_path: Path) -> None:
    before = {f"p{n}": [0.0, 0.0] for n in range(10)}
    now = {f"p{n}": [1.0, 1.0] for n in range(1, 12)}
    base = {prompt: [0.0, 0.0] for prompt in before | now}
    first, second = (
        Summary(
            name,
            RunConfig(iterations=1),
            "store",
            artifacts={"iteration-1/evaluate": write_evaluation(tmp_path / name, rewards, base)},
        )
        for name, rewards in (("first", before), ("second", now))
    )
    names = ("mean_reward", "win_rate", "mean_log_pi_ref", "mean_response_tokens")
    found = {each.figure: each for each in adjusted([*compared(first, second, 1, names)])}
    assert set(found) == {"mean_reward", "win_rate", "mean_log_pi_ref"}, "lengths are the same"
    reward = found["mean_reward"]
    assert reward.prompts == 9
    assert (reward.first, reward.second, reward.difference) == (0.0, 1.0, 1.0)
    assert (reward.low, reward.high) == (1.0, 1.0)
    # Two of 2^9 patterns of signs are as extreme; three figures were compared.
    assert reward.p_value == pytest.approx(2 / 2**9)
    assert reward.adjusted_p_value == pytest.approx(3 * 2 / 2**9)
    assert str(reward.shown()) == "+1.000 [+1.000, +1.000]"
    assert [*compared(first, first, 1, names), *compared(first, second, 2, names)] == []


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({"pass_at_k": [2]}, "set the smallest score of a correct response"),
        ({"pass_at_k": [65], "correct_from": 1.0}, "raise num_samples"),
        ({"pass_at_k": [0], "correct_from": 1.0}, "pass_at_k has 0"),
    ],
)
def test_pass_at_k_that_cannot_be_estimated_is_refused(
    evaluation: dict[str, Any], said: str
) -> None:
    from flows.pipeline.loading import check_config

    with pytest.raises(UserError, match=said):
        check_config({"evaluation": evaluation}, "test")


def test_what_only_reports_read_does_not_reach_the_stages() -> None:
    plain, solved = (
        RunConfig.model_validate({"evaluation": evaluation}).evaluation_sampling().result_fields()
        for evaluation in ({}, {"correct_from": 1.0, "pass_at_k": (4,)})
    )
    assert plain == solved
