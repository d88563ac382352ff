"""Figures of a run with their intervals, and differences of two runs, from samples by hand."""

import json

import numpy as np
import pytest
from rich.console import Console

from flows.pipeline.config import RunConfig
from flows.report.differences import adjusted, compared
from flows.report.summary import Summary, evaluated_row, iteration_row
from stages.evaluate.statistics import CONFIDENCE, Estimate, ratio_of_sums
from stages.tables.wilson import wilson_interval
from tests.flows.report.evaluations import artifact_in, write_evaluation

POLICY = {"a": [1.0, 1.0], "b": [1.0, 0.0], "c": [0.0, 0.0], "d": [0.5, None]}
BASE = {"a": [0.0, 1.0], "b": [0.0, 1.0], "c": [1.0, 0.0], "d": [0.0, 0.0]}


def test_intervals_are_bootstraps_over_prompts_and_wilson_s(tmp_path):
    evaluated = write_evaluation(tmp_path / "evaluate", POLICY, BASE)
    figures = evaluated_row(evaluated, 1).figures
    assert figures["mean_reward"] == ratio_of_sums(np.array([2.0, 1.0, 0.0]), np.full(3, 2.0))
    assert figures["win_rate"] == Estimate(1 / 3, *wilson_interval(1, 3, CONFIDENCE))


def summary(folder, policy):
    """A run of one iteration whose evaluation is written by hand."""
    metrics = {"mean_reward": 0.5, "win_rate": 1 / 3, "tied_prompts": 1, "base_mean_reward": 0.5}
    artifacts = {
        "iteration-1/evaluate": write_evaluation(folder, policy, BASE, metrics, tries=(2,))
    }
    run = Summary(folder.name, RunConfig(iterations=1), "store", artifacts=artifacts)
    run.rows += [iteration_row(run, 0), iteration_row(run, 1)]
    return run


def test_the_run_s_table_shows_intervals_ties_and_solved_problems(tmp_path):
    run = summary(tmp_path / "run", POLICY)
    base, row = run.tables()[0].records()
    explained = ["mean reward", "win rate", "accuracy", "pass@2"]
    assert list(row) == ["iteration", *explained, "tied", "log π_ref", "tokens"]
    assert (row["iteration"], base["iteration"]) == ("1", "base")
    assert (row["win rate"], base["win rate"]) == ("0.333 [0.061, 0.792]", "-")
    assert row["tied"] == "1"
    assert row["pass@2"].startswith("0.667 [")
    assert base["accuracy"].startswith("0.375 [")
    low, high = run.rows[1].figures["mean_reward"].interval or (1, 0)
    assert low < 0.5 < high
    console = Console(width=300)
    with console.capture() as shown:
        console.print(*run.tables())
    assert "[0.061, 0.792]" in shown.get()
    assert "0.333 [" not in shown.get(), "the interval stands below its figure"


def test_runs_differ_by_what_their_shared_prompts_say(tmp_path):
    before = {f"p{n}": [0.0, 0.0] for n in range(10)}
    now = {f"p{n}": [1.0, 1.0] for n in range(1, 12)}
    base = {prompt: [0.0, 0.0] for prompt in before | now}
    runs = []
    for name, rewards in (("first", before), ("second", now)):
        artifacts = {"iteration-1/evaluate": write_evaluation(tmp_path / name, rewards, base)}
        run = Summary(name, RunConfig(iterations=1), "store", artifacts=artifacts)
        run.rows += [iteration_row(run, 0), iteration_row(run, 1)]
        runs.append(run)
    first, second = runs
    names = ("mean_reward", "win_rate", "mean_log_pi_ref", "mean_response_tokens")
    tests = {test.figure: test for test in adjusted([*compared(first, second, names)])}
    assert set(tests) == {"mean_reward", "win_rate", "mean_log_pi_ref"}, "lengths are the same"
    reward = tests["mean_reward"]
    assert reward.test == "9 prompts, iteration 1"
    assert (reward.estimate.value, reward.estimate.interval) == (1.0, (1.0, 1.0))
    # Two of 2^9 patterns of signs are as extreme; three figures were compared.
    assert reward.estimate.p_value == pytest.approx(2 / 2**9)
    assert reward.adjusted_p_value == pytest.approx(3 * 2 / 2**9)
    assert str(reward.shown()) == "+1.000 [+1.000, +1.000]"
    assert list(compared(first, first, names)) == []
    second.artifacts.clear()
    assert list(compared(first, second, names)) == [], "its evaluation is gone"


def test_a_row_has_the_last_step_s_kappa_and_none_without_a_bonus(tmp_path):
    metrics = {"kappa": 0.03, "bonus_ratio": 0.5, "loss": 0.6}
    text = json.dumps({"kappa": 0.04, "metrics": metrics})
    (tmp_path / "summary.json").write_text(text)
    rows = {}
    for design in ("one_minus_pi", "none"):
        config = RunConfig.model_validate({"train": {"design": design}})
        run = Summary("small", config, "s", artifacts={"iteration-1/train": artifact_in(tmp_path)})
        rows[design] = iteration_row(run, 1).values
    assert rows["one_minus_pi"] == {"kappa": 0.04, "bonus_ratio": 0.5, "loss": 0.6}
    assert rows["none"] == {"loss": 0.6}
