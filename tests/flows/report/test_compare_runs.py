"""Comparison of runs: `geb compare`, its flow, and the files that both write."""

import json
import re
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.pipeline.config import RunConfig
from flows.report.comparison import compare_summaries
from flows.report.comparison_files import write_comparison
from flows.report.rows import HELD_OUT
from flows.report.summary import Summary, iteration_row
from stages.contract.errors import UserError
from stages.contract.request import FileInput, HubInput
from stages.score.params import ScoreParams
from stages.store.base import Store
from tests.flows.loop import geb_json, geb_ok, geb_refused
from tests.flows.report.evaluations import artifact_in, write_evaluation

PROMPTS = [f"p{number}" for number in range(12)]


def run(folder, name, *rewards, seed=0, **train):
    """A run of an iteration for each reward, which is the same for every prompt."""
    base = {prompt: [0.0, 0.5] for prompt in PROMPTS}
    place = folder / f"{name}-{seed}"
    artifacts = {}
    for iteration, reward in enumerate(rewards, 1):
        policy = {prompt: [reward, reward] for prompt in PROMPTS}
        metrics = {
            "mean_reward": reward,
            "win_rate": float(reward > 0.25),
            "tied_prompts": 0,
            "mean_log_pi_ref": -10 * reward,
            "base_mean_reward": 0.25,
        }
        evaluation = write_evaluation(place / f"e{iteration}", policy, base, metrics)
        artifacts[f"iteration-{iteration}/evaluate"] = evaluation
        trained = place / f"train{iteration}"
        trained.mkdir()
        pq.write_table(
            pa.table({"chosen_logprobs": [[-1.0, -2.0]], "rejected_logprobs": [[-reward] * 3]}),
            trained / "reference_logprobs.parquet",
        )
        (trained / "summary.json").write_text("{}")
        artifacts[f"iteration-{iteration}/train"] = artifact_in(trained)
    iterations = len(rewards)
    config = RunConfig.model_validate(
        {"name": name, "seed": seed, "iterations": iterations, "train": {"design": "none", **train}}
    )
    summary = Summary(name, config, "store", artifacts=artifacts)
    summary.rows = [iteration_row(summary, iteration) for iteration in range(iterations + 1)]
    return summary


@pytest.fixture
def two(tmp_path):
    return [run(tmp_path, "plain", 0.2), run(tmp_path, "bonus", 0.9, design="one_minus_pi")]


@pytest.mark.parametrize(
    ("iterations", "difference"), [(1, 0.7), (2, 0.3)], ids=["finished", "unfinished"]
)
def test_an_unfinished_run_alone_is_compared_before_the_end(tmp_path, iterations, difference):
    short = run(tmp_path, "short", 0.2)
    short.config = short.config.model_copy(update={"iterations": iterations})
    compared = compare_summaries([short, run(tmp_path, "long", 0.5, 0.9)])
    reward = next(test for test in compared.differences if test.figure == "mean_reward")
    assert reward.estimate.value == pytest.approx(difference)


def test_runs_are_tested_against_the_first(two, tmp_path):
    comparison = compare_summaries(two)
    label = "one_minus_pi, reverse_kl, κ 1"
    assert comparison.methods == {"plain": "f-DPO, reverse_kl", "bonus": label}
    tests = {test.figure: test for test in comparison.differences}
    assert set(tests) == {"mean_reward", "win_rate", "mean_log_pi_ref"}
    reward = tests["mean_reward"]
    assert (reward.name, reward.against) == ("bonus", "plain")
    assert reward.estimate.value == pytest.approx(0.7)
    assert comparison.over_seeds == [], "one seed of each"
    changed = "train.design 'none' → 'one_minus_pi'"
    assert comparison.settings == {label: [changed]}
    assert comparison.tables()[-1].rows == [[label, changed]]
    more = compare_summaries([*two, run(tmp_path, "third", 0.8, design="inverse_pi")])
    values = [test.adjusted_p_value for test in more.differences]
    # Two of 2^12 patterns of signs are as extreme.
    assert values == pytest.approx([6 * 2 / 2**12] * 6), "adjusted over all runs"


def test_a_seed_counts_once_and_a_run_that_ended_early_not_at_all(tmp_path):
    runs = [run(tmp_path, f"plain-{s}", 0.1, 0.2 + s / 100, seed=s) for s in range(3)]
    runs += [run(tmp_path, f"again-{s}", 0.1, 0.2 + s / 100, seed=s) for s in range(3)]
    runs += [
        run(tmp_path, f"bonus-{s}", 0.1, 0.9 + s / 50, seed=s, design="arctanh") for s in range(3)
    ]
    stopped = run(tmp_path, "stopped", 0.1, seed=3, design="arctanh")
    stopped.config = stopped.config.model_copy(update={"iterations": 2})
    comparison = compare_summaries([*runs, stopped])
    first, second = (row for row in comparison.over_seeds if row.figure == "mean_reward")
    assert first.values == pytest.approx([0.2, 0.21, 0.22])
    assert second.values == pytest.approx([0.9, 0.92, 0.94])
    [test] = [test for test in comparison.differences if test.figure == "mean_reward"]
    assert test.test == "paired"
    assert "stopped has 1 of 2 iterations." in comparison.verdict()


def test_a_method_without_a_finished_run_is_named(tmp_path):
    finished = [run(tmp_path, f"plain-{s}", 0.1, 0.2, seed=s) for s in range(2)]
    stopped = [run(tmp_path, f"bonus-{s}", 0.5, seed=s, design="arctanh") for s in range(2)]
    for unfinished in stopped:
        unfinished.config = unfinished.config.model_copy(update={"iterations": 2})
    for runs in ([*finished, *stopped], [*stopped, *finished]):
        comparison = compare_summaries(runs)
        assert "no run of arctanh, reverse_kl, κ 1 is finished" in comparison.verdict()
        assert "no shared prompt" not in comparison.verdict()


def test_runs_of_another_oracle_are_another_method(tmp_path):
    runs = [run(tmp_path, "one", 0.3), run(tmp_path, "two", 0.9, seed=1)]
    assert compare_summaries(runs).methods["two"] == "f-DPO, reverse_kl"
    for summary, digest in zip(runs, ("0", "1"), strict=True):
        oracle = FileInput(location="oracle.py", digest=digest)
        scored = artifact_in(tmp_path / summary.run, oracle)
        summary.artifacts["base/score/0"] = scored
    edited = compare_summaries(runs)
    assert edited.methods["two"] == "f-DPO, reverse_kl (two)"
    assert "(held-out prompts): two has other" in edited.verdict()


JUDGE = {"oracle": "judge", "judge": {"url": "http://judge/v1", "model": "a", "mode": "pairwise"}}


@pytest.mark.parametrize("step", ["base/generate/0", "sft"])
def test_a_judge_that_compares_is_relative_to_the_base(two, tmp_path, step):
    for summary, model in zip(two, "ab", strict=True):
        base = HubInput(repo=f"owner/{model}", revision="0" * 40)
        summary.artifacts[step] = artifact_in(tmp_path / summary.run, base)
    assert "may not compare" not in compare_summaries(two).verdict()
    for summary in two:
        update = {"score": ScoreParams.model_validate(JUDGE)}
        summary.config = summary.config.model_copy(update=update)
    assert "may not compare (held-out prompts): " in compare_summaries(two).verdict()


def test_win_rates_against_other_bases_are_cautioned(two, tmp_path):
    for summary, model in zip(two, "ab", strict=True):
        base = HubInput(repo=f"owner/{model}", revision="0" * 40)
        summary.artifacts["base/generate/0"] = artifact_in(tmp_path / summary.run, base)
    assert "Win rates do not compare: bonus and plain" in compare_summaries(two).verdict()


def test_other_held_out_prompts_are_cautioned(two, tmp_path):
    for summary, digest in zip(two, "01", strict=True):
        prompts = FileInput(location="prompts.jsonl", digest=digest)
        summary.artifacts["prepare"] = artifact_in(tmp_path / summary.run, prompts)
    assert "may not compare (held-out prompts): " in compare_summaries(two).verdict()


def test_warm_starts_with_other_settings_are_other_bases(two):
    values = {"score": JUDGE, "inputs": {"warm_start": "chats.jsonl"}}
    for summary, epochs in zip(two, (1, 2), strict=True):
        values |= {"name": summary.run, "iterations": 1, "sft": {"epochs": epochs}}
        summary.config = RunConfig.model_validate(values)
    assert "may not compare (held-out prompts): " in compare_summaries(two).verdict()


def test_the_oracle_of_a_suite_is_cautioned_as_its_own(two, tmp_path):
    for summary, digest in zip(two, ("0", "1"), strict=True):
        suites = {}
        for name, model in (("edited", "a"), ("other", f"a{digest}"), ("same", "a")):
            judge = {"judge": {"url": "http://judge/v1", "model": model}}
            suites[name] = {"prompts": "own.jsonl", "score": {"oracle": "judge", **judge}}
        values = {"name": summary.run, "iterations": 1, "suites": suites}
        summary.config = RunConfig.model_validate(values)
        code = FileInput(location="code.py", digest=digest)
        scored = artifact_in(tmp_path / summary.run, code)
        summary.artifacts["base/suite-edited/score/0"] = scored
    assert "may not compare (edited, other): " in compare_summaries(two).verdict()


def test_other_sampling_of_an_evaluation_is_cautioned(two):
    for summary, temperature in zip(two, (0.6, 1.0), strict=True):
        suites = {"own": {"prompts": "own.jsonl", "evaluation": {"temperature": temperature}}}
        suites["same"] = {"prompts": "own.jsonl", "evaluation": {"pass_at_k": [1]}}
        values = {"name": summary.run, "iterations": 1, "suites": suites}
        summary.config = RunConfig.model_validate(values)
    assert "may not compare (own): " in compare_summaries(two).verdict()
    thinking = {"chat_template_args": {"enable_thinking": True}}
    generate = two[1].config.generate.model_copy(update=thinking)
    two[1].config = two[1].config.model_copy(update={"generate": generate})
    assert "may not compare (held-out prompts, own, same): " in compare_summaries(two).verdict()


def test_repetitions_may_differ_in_settings_of_speed(tmp_path):
    runs = [run(tmp_path, f"on-{host}", 0.3, seed=seed) for seed, host in enumerate("ab")]
    for summary in runs:
        address = f"http://{summary.run}/v1"
        judge = {"oracle": "judge", "judge": {"url": address, "model": "m"}}
        changes = {
            "score": {"reward_model": {"tokens_per_batch": 1024 * (1 + summary.config.seed)}},
            "generate": {"vllm": {"max_num_seqs": 64 * (1 + summary.config.seed)}},
            "suites": {"own": {"prompts": "own.jsonl", "score": judge}},
        }
        summary.config = RunConfig.model_validate(summary.config.to_values() | changes)
    assert len(set(compare_summaries(runs).methods.values())) == 1
    suites = {"own": {"prompts": "other.jsonl"}}
    runs[1].config = RunConfig.model_validate(runs[1].config.to_values() | {"suites": suites})
    assert len(set(compare_summaries(runs).methods.values())) == 2


def test_the_same_answers_in_other_batches_show_no_difference(tmp_path):
    runs = [run(tmp_path, "one", 0.3), run(tmp_path, "two", 0.1 + 0.2 + 1e-9)]
    assert compare_summaries(runs).differences == []


def test_an_earlier_iteration_of_a_suite_is_left_out(two, tmp_path):
    longer = run(tmp_path, "longer", 0.3, 0.9, design="one_minus_pi")
    longer.suites["own"] = longer.rows[:2]
    two[0].suites["own"] = two[0].rows
    figures = compare_summaries([two[0], longer]).to_json()["figures"]
    assert set(figures["plain"]) == {HELD_OUT, "own"}
    assert set(figures["longer"]) == {HELD_OUT}


def test_a_suite_without_the_first_method_is_not_tested(two, tmp_path):
    others = [run(tmp_path, f"more-{s}", 0.8, seed=s, design="inverse_pi") for s in range(2)]
    for summary in (two[1], *others):
        summary.suites["own"] = [summary.rows[-1]]
    comparison = compare_summaries([*two, *others])
    assert {row.evaluation for row in comparison.over_seeds} == {HELD_OUT, "own"}
    assert {test.evaluation for test in comparison.differences} == {HELD_OUT}


def test_a_comparison_begins_with_its_verdict(two, tmp_path):
    start = "By mean reward on the held-out prompts, against plain: "
    # As many of 2^12 patterns of signs as before, and of three tests in all.
    better = "bonus is better, +0.700 [+0.700, +0.700], p = 0.001"
    assert compare_summaries(two).verdict() == f"{start}{better}."
    worse = compare_summaries(two[::-1]).verdict()
    assert worse.endswith("against bonus: plain is worse, -0.700 [-0.700, -0.700], p = 0.001.")
    same = compare_summaries([*two, run(tmp_path, "same", 0.2, design="arctanh")])
    assert same.verdict().endswith(
        "; same: no difference is shown, no shared prompt has other rewards."
    )
    # So does a run of another seed, which holds out other prompts.
    others = {f"other {prompt}": [0.9, 0.9] for prompt in PROMPTS}
    apart = run(tmp_path, "apart", 0.9, seed=1, design="feb")
    apart.artifacts["iteration-1/evaluate"] = write_evaluation(tmp_path / "o", others, others, {})
    verdict = compare_summaries([two[0], apart]).verdict()
    assert verdict.endswith("apart: no difference is shown, no shared prompt has other rewards.")
    nearly = run(tmp_path, "nearly", 0.2, design="inverse_pi")
    # One prompt's rewards are enough for a difference, and not for a test to find it.
    other = {prompt: [0.2 + 0.4 * (prompt == "p0")] * 2 for prompt in PROMPTS}
    base = {prompt: [0.0, 0.5] for prompt in PROMPTS}
    place = write_evaluation(tmp_path / "other", other, base, {"mean_reward": 0.25})
    nearly.artifacts["iteration-1/evaluate"] = place
    verdict = compare_summaries([two[0], nearly]).verdict()
    assert "against plain: nearly: no difference is shown, +0.033 [" in verdict
    assert verdict.endswith("p = 1.000.")
    runs = [run(tmp_path, f"plain-{seed}", 0.2 + seed / 100, seed=seed) for seed in range(3)]
    runs += [run(tmp_path, f"bonus-{s}", 0.9 + s / 50, seed=s, design="arctanh") for s in range(3)]
    del runs[-1].rows[-1].figures["mean_log_pi_ref"]
    seeds = compare_summaries(runs).verdict()
    assert seeds.startswith(f"{start.removesuffix('plain: ')}f-DPO, reverse_kl: arctanh, ")
    assert " is better, +0.710 [" in seeds and seeds.endswith(", p < 0.001.")
    assert (
        compare_summaries(runs[1:]).verdict().endswith(" A method has 2 finished seeds: too few.")
    )
    assert compare_summaries(two[:1]).verdict().startswith("plain is the only one")
    longer = replace(two[1], config=two[1].config.model_copy(update={"iterations": 2}))
    assert compare_summaries([two[0], longer]).verdict().endswith(". bonus has 1 of 2 iterations.")


def test_a_comparison_is_a_page_and_a_document(two, tmp_path):
    store = Store.in_folder(str(tmp_path / "store"), create=True)
    written = write_comparison(store, compare_summaries(two), "compared")
    folder = store.run_path("compared")
    assert written.page == str(folder / "comparison.html")
    assert {path.name for path in folder.iterdir()} == {"comparison.html", "comparison.json"}
    page = (folder / "comparison.html").read_text()
    assert "bonus is better, +0.700" in page.split("<h2>")[0]
    assert page.count("<svg") == 1
    assert "0.900" in page
    assert not re.search(r"(src|href)=.http", page), "a page for use without a network"
    document = json.loads((folder / "comparison.json").read_text())
    assert document["differences"][0]["against"] == "plain"
    figures = document["figures"]["bonus"][HELD_OUT]["figures"]
    assert figures["mean_reward"]["value"] == 0.9


def test_a_run_without_an_evaluation_is_refused(two):
    del two[1].rows[1].figures["mean_reward"]
    with pytest.raises(UserError, match="run bonus has no evaluation"):
        compare_summaries(two)


@pytest.fixture(scope="module")
def store(finished, tmp_path_factory):
    """A store with two records of a finished run."""
    store = tmp_path_factory.mktemp("compare") / "store"
    shutil.copytree(finished.parent / "store", store, copy_function=shutil.copy2)
    shutil.copytree(store / "runs/small", store / "runs/again")
    return store


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_a_page_under_a_name(store):
    done = geb_ok("compare", "small", "again", "--store", store)
    assert done.stdout.startswith("By mean reward on the held-out prompts, against small: again: ")
    assert "Runs, held-out prompts" in done.stdout
    assert "page" not in done.stdout
    document = geb_json("compare", "small", "again", "--store", store, "--name", "mine")
    assert document["differences"] == [], "the same samples"
    assert document["verdict"].endswith(
        "no difference is shown, no shared prompt has other rewards."
    )
    assert document["page"] == str(store / "runs/mine/comparison.html")
    assert document["settings"] == {}
    for arguments, refusal in (
        (["small", "small"], "cannot be compared"),
        (["small", "again", "--name", "small"], "'small' is a run of the store"),
        (["small", "again", "--name", "../up"], "cannot name a comparison"),
    ):
        assert refusal in geb_refused("compare", *arguments, "--store", store)


@pytest.mark.slow
def test_the_flow_shows_its_tables(prefect_server, store):
    from flows.compare import compare

    with temporary_settings({PREFECT_API_URL: prefect_server}):
        compare(["small", "again"], "by-flow", str(store))
        with get_client(sync_client=True) as client:
            artifacts = client.read_artifacts(limit=200)
    keys = {artifact.key: artifact for artifact in artifacts}
    page = str(keys["by-flow-report"].data)
    assert "## Runs, held-out prompts" in page
    assert max(line.count("|") for line in page.splitlines()) == 8, "seven columns have room"
