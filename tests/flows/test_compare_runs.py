"""Comparison of runs: `geb compare`, its flow, and the files that both write."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.pipeline.config import RunConfig
from flows.report.comparison import compare_summaries
from flows.report.comparison_files import write_files
from flows.report.comparison_tables import figure_title, latex, tables
from flows.report.last_iteration import HELD_OUT, training_log_pi_ref
from flows.report.summary import Summary, iteration_row
from flows.report.table import SuiteFigures
from stages.contract.errors import UserError
from tests.flows.evaluations import artifact_in, write_evaluation
from tests.flows.loop import geb
from tests.small_disk import contents, no_room

PROMPTS = [f"p{number}" for number in range(12)]


def run(folder: Path, name: str, reward: float, seed: int = 0, **train: Any) -> Summary:
    """A run of one iteration with the same reward for every prompt."""
    policy = {prompt: [reward, reward] for prompt in PROMPTS}
    base = {prompt: [0.0, 0.5] for prompt in PROMPTS}
    metrics = {
        "mean_reward": reward,
        "win_rate": float(reward > 0.25),
        "tied_prompts": 0,
        "mean_log_pi_ref": -10 * reward,
        "reward_components": {"style": reward},
        "base_mean_reward": 0.25,
    }
    place = folder / f"{name}-{seed}"
    artifacts = {"iteration-1/evaluate": write_evaluation(place / "e", policy, base, metrics)}
    trained = place / "train"
    trained.mkdir()
    pq.write_table(
        pa.table({"chosen_logprobs": [[-1.0, -2.0]], "rejected_logprobs": [[-reward] * 3]}),
        trained / "reference_logprobs.parquet",
    )
    (trained / "summary.json").write_text("{}")
    artifacts["iteration-1/train"] = artifact_in(trained)
    config = RunConfig.model_validate(
        {"name": name, "seed": seed, "iterations": 1, "train": {"design": "none", **train}}
    )
    found = Summary(name, config, "store", artifacts=artifacts)
    found.rows = [iteration_row(found, iteration) for iteration in (0, 1)]
    return found


@pytest.fixture
def two(tmp_path: Path) -> list[Summary]:
    return [run(tmp_path, "plain", 0.2), run(tmp_path, "bonus", 0.9, design="one_minus_pi")]


def test_runs_are_tested_against_the_first(two: list[Summary]) -> None:
    found = compare_summaries(two)
    assert found.methods == {
        "plain": "f-DPO, reverse_kl",
        "bonus": "one_minus_pi, reverse_kl, κ 1",
    }
    paired = {each.compared.figure: each for each in found.paired}
    assert set(paired) == {"mean_reward", "win_rate", "mean_log_pi_ref"}
    reward = paired["mean_reward"].compared
    assert (paired["mean_reward"].run, paired["mean_reward"].against) == ("bonus", "plain")
    assert reward.difference == pytest.approx(0.7)
    # Two of 2^12 patterns of signs; three tests in all.
    assert reward.p_value == pytest.approx(2 / 2**12)
    assert reward.adjusted_p_value == pytest.approx(3 * 2 / 2**12)
    assert found.over_seeds == [], "one seed of each"
    assert found.evaluations() == [HELD_OUT]


def test_p_values_are_adjusted_over_all_runs(two: list[Summary], tmp_path: Path) -> None:
    third = run(tmp_path, "third", 0.8, design="inverse_pi")
    found = compare_summaries([*two, third])
    values = [each.compared.adjusted_p_value for each in found.paired]
    assert values == pytest.approx([6 * 2 / 2**12] * 6)


def test_repetitions_of_one_method_are_taken_together(tmp_path: Path) -> None:
    runs = [run(tmp_path, f"plain-{seed}", 0.2 + seed / 100, seed) for seed in range(3)]
    runs += [run(tmp_path, f"bonus-{s}", 0.9 + s / 50, s, design="arctanh") for s in range(3)]
    found = compare_summaries(runs)
    assert len(set(found.methods.values())) == 2
    first, second = (each for each in found.over_seeds if each.figure == "mean reward")
    assert (first.seeds, second.seeds) == (3, 3)
    assert first.mean.value == pytest.approx(0.21)
    assert second.difference is not None
    assert second.difference.value == pytest.approx(0.92 - 0.21)
    assert second.p_value is not None and second.p_value < 0.001
    assert second.adjusted_p_value == second.p_value, "one method against the first"


def test_a_suite_of_a_later_method_alone_is_not_tested_against_another(
    two: list[Summary], tmp_path: Path
) -> None:
    others = [run(tmp_path, f"more-{s}", 0.8, s, design="inverse_pi") for s in range(2)]
    for each in (two[1], *others):
        each.suites.append(SuiteFigures("own", [dict(each.rows[-1])]))
    rows = compare_summaries([*two, *others]).over_seeds
    assert any(each.difference is not None for each in rows if each.evaluation == HELD_OUT)
    assert all(each.difference is None for each in rows if each.evaluation == "own")


def test_the_training_s_distribution_is_of_chosen_and_rejected_responses(
    two: list[Summary],
) -> None:
    assert training_log_pi_ref(two[0]) == pytest.approx([-3.0, -0.6])


def test_everything_is_written(two: list[Summary], tmp_path: Path) -> None:
    folder = tmp_path / "compared"
    written = {path.name for path in write_files(compare_summaries(two), folder)}
    assert written == {
        *("comparison.html", "comparison.json", "figures.csv", "paired-differences.csv"),
        *("figures-held-out.tex", "differences.tex", "log-pi-ref-of-training.png"),
        "curve-mean-reward.png",
    }
    page = (folder / "comparison.html").read_text()
    assert page.count("<svg") == 2
    assert "0.900" in page and "[0.900, 0.900]" in page
    assert not re.search(r"(src|href)=.http", page), "a page for use without a network"
    rows = list(csv.DictReader((folder / "figures.csv").read_text().splitlines()))
    assert {"run": "bonus", "figure": "mean reward", "value": "0.9"}.items() <= next(
        row for row in rows if row["run"] == "bonus" and row["figure"] == "mean reward"
    ).items()
    told = json.loads((folder / "comparison.json").read_text())
    assert told["paired_differences"][0]["against"] == "plain"
    assert (folder / "curve-mean-reward.png").read_bytes().startswith(b"\x89PNG")


def test_latex_is_escaped(two: list[Summary]) -> None:
    shown, differences = tables(compare_summaries(two))
    text = latex(shown)
    assert r"one\_minus\_pi, reverse\_kl, $\kappa$ 1" in text
    assert r"95 \% intervals" in text
    assert r"log $\pi$\_ref & -2.000 [-2.000, -2.000] & -9.000" in text
    assert r"bonus $-$ plain" in latex(differences)


def test_figures_have_the_titles_of_the_run_s_table() -> None:
    assert figure_title("mean_reward") == "mean reward"
    assert figure_title("components.style") == "style"
    assert figure_title("pass@4") == "pass@4"


def test_what_cannot_be_compared_is_refused(two: list[Summary]) -> None:
    for runs in ([], two[:1], [two[0], two[0]]):
        with pytest.raises(UserError, match="cannot be compared"):
            compare_summaries(runs)
    two[1].rows[1]["mean_reward"] = None
    with pytest.raises(UserError, match="run bonus has no evaluation"):
        compare_summaries(two)


@pytest.fixture(scope="module")
def store(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two records of a finished run."""
    store = tmp_path_factory.mktemp("compare") / "store"
    shutil.copytree(finished.parent / "store", store, copy_function=shutil.copy2)
    shutil.copytree(store / "runs/small", store / "runs/again")
    return store


@pytest.mark.slow
def test_the_command_writes_into_the_store(store: Path) -> None:
    done = geb("compare", "small", "again", "--store", store)
    assert done.returncode == 0, done.stderr
    assert "Figures on held-out prompts" in done.stdout
    assert Path(done.stdout.split("page")[-1].strip()).is_relative_to(store / "runs")
    told = geb("compare", "small", "again", "--store", store, "--name", "mine", "--json")
    assert json.loads(told.stdout)["paired_differences"] == [], "the same samples"
    assert (store / "runs/mine/comparison.html").exists()
    for arguments, said in (
        (["small"], "cannot be compared"),
        (["small", "nobody"], "no run 'nobody'"),
        (["small", "again", "--name", "small"], "'small' is a run of the store"),
        (["small", "again", "--name", "../up"], "cannot name a comparison"),
    ):
        refused = geb("compare", *arguments, "--store", store)
        assert refused.returncode == 64, refused.stderr
        assert said in refused.stderr


@pytest.mark.slow
def test_the_flow_shows_tables_and_figures(prefect_server: str, store: Path) -> None:
    from flows.compare import compare

    with temporary_settings({PREFECT_API_URL: prefect_server}):
        found = compare(["small", "again"], "by-flow", str(store))
        with get_client(sync_client=True) as client:
            artifacts = client.read_artifacts(limit=200)
    assert found.name == "by-flow"
    keys = {each.key: each for each in artifacts}
    assert "## Figures on held-out prompts" in str(keys["by-flow-report"].data)
    assert "by-flow-log-pi-ref-of-training" in keys


def test_a_disk_without_room_leaves_the_files_of_before(two: list[Summary], tmp_path: Path) -> None:
    folder = tmp_path / "compared"
    write_files(compare_summaries(two), folder)
    before = contents(folder)
    with pytest.raises(OSError), no_room():
        write_files(compare_summaries(two[::-1]), folder)
    assert contents(folder) == before


def test_the_interval_of_a_share_over_seeds_ends_where_shares_do(tmp_path: Path) -> None:
    # Two of three seeds win against the base, each on all prompts.
    runs = [run(tmp_path, f"plain-{seed}", 0.2 + seed / 10, seed) for seed in range(3)]
    found = {each.figure: each.mean for each in compare_summaries(runs).over_seeds}
    assert found["win rate"].value == pytest.approx(2 / 3)
    assert found["win rate"].interval == (0.0, 1.0)
    assert found["mean reward"].interval == pytest.approx((0.0516, 0.5484), abs=1e-3)
