"""The verdict of a report, and what stands around it."""

import json
import socket
import warnings
from pathlib import Path

import pytest

from flows.execution.run_record import DamagedRecordWarning, RunRecord
from flows.pipeline.algorithm import unread_steps
from flows.pipeline.config import RunConfig
from flows.report.html import write
from flows.report.summary import Summary, iteration_row, summarise
from flows.report.verdict import verdict
from stages.evaluate.statistics import Estimate
from tests.flows.records import recorded
from tests.flows.report.evaluations import artifact_in, figure_row, write_evaluation
from tests.stage_calls import checkpoint_artifact


def summary(folder, *, promoted, aliases=("production",)):
    """One iteration with 0.9 wins; its gates passed, failed, or were not asked yet."""
    artifacts = {}
    if promoted is not None:
        gate = {"gate": "min_win_rate", "passed": promoted, "reason": "the win rate is 0.9"}
        decision = {"aliases": aliases, "gates": [gate]}
        (folder / "decision.json").write_text(json.dumps(decision))
        artifacts["iteration-1/promote"] = artifact_in(folder)
    rows = [
        figure_row(0, mean_reward=0.5),
        figure_row(1, mean_reward=(0.75, 0.7, 0.8), win_rate=(0.9, 0.85, 0.95), tied_prompts=3),
    ]
    config = RunConfig(iterations=1, train={"beta": 0.5})
    return Summary("small", config, "store", artifacts=artifacts, rows=rows)


@pytest.mark.parametrize(
    ("promoted", "tone", "end"),
    [
        (True, "good", "It passed every gate and was promoted to production."),
        (False, "bad", "It was not promoted."),
        (None, "open", "the base's 0.500."),
    ],
)
def test_the_verdict_is_one_sentence_with_its_interval(tmp_path, promoted, tone, end):
    result = verdict(summary(tmp_path, promoted=promoted))
    assert result.tone == tone
    assert result.sentence.startswith(
        "After 1 iteration the model scores above its base on 90.0% [85.0%, 95.0%] of the "
        "held-out prompts (3 tie); its mean reward is 0.750 [0.700, 0.800]"
    )
    assert result.sentence.endswith(end)
    assert result.reasons == (("the win rate is 0.9",) if promoted is False else ())
    bare = summary(tmp_path, promoted=None)
    bare.rows[1] = figure_row(1)
    assert verdict(bare).sentence == "No iteration has been evaluated yet."


def test_a_model_that_passes_and_takes_no_alias_is_not_promoted(tmp_path):
    result = verdict(summary(tmp_path, promoted=True, aliases=()))
    assert result.tone == "open"
    assert "was not promoted" in result.sentence
    [reason] = result.reasons
    assert "geb promote" in reason


def test_doubts_of_a_training_are_in_the_verdict(tmp_path):
    run = summary(tmp_path, promoted=None)
    trained = {"cautions": ["layers are not compiled"]}
    (tmp_path / "summary.json").write_text(json.dumps(trained))
    run.artifacts["iteration-1/train"] = artifact_in(tmp_path)
    assert verdict(run).cautions == ("training of iteration 1: layers are not compiled",)


def test_the_verdict_says_how_far_to_trust_it(tmp_path):
    metrics = {"compared_prompts": 64}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    run = summary(tmp_path, promoted=None)
    run.artifacts["iteration-1/evaluate"] = artifact_in(tmp_path)
    base, now = run.rows
    base.figures["components.right"] = Estimate(1.0)
    base.figures["components.polite"] = Estimate(0.5)
    now.figures["components.right"] = Estimate(0.975, 0.94, 1.0)
    now.figures["components.polite"] = Estimate(0.75)
    run.suites["sums"] = [
        figure_row(0, mean_reward=0.5, accuracy=0.25),
        figure_row(1, mean_reward=0.4, accuracy=0.5),
    ]
    assert verdict(run).cautions == (
        "one training seed, 64 held-out prompts; `geb sweep --seeds` tries other seeds",
        "right fell from 1.000 to 0.975 [0.940, 1.000]",
        "suite sums, mean reward fell from 0.500 to 0.400",
    )


@pytest.mark.parametrize(
    ("ties", "figures", "said"),
    [
        ("keep", {"pairs": 100, "ties": 91}, "91 of 100 pairs"),
        ("drop", {"pairs": 9, "ties": 91}, "91 of 100 pairs"),
        ("keep", {"pairs": 100, "ties": 90}, None),
        ("drop", {"pairs": 100, "ties": 91}, None),
    ],
)
def test_a_verdict_names_iterations_whose_pairs_nearly_all_tie(tmp_path, ties, figures, said):
    run = summary(tmp_path, promoted=True)
    run.config = RunConfig.model_validate({"iterations": 1, "pair": {"ties": ties}})
    run.rows[1].figures.update(figure_row(1, **figures).figures)
    reasons = verdict(run).reasons
    assert len(reasons) == (said is not None)
    assert all(reason.startswith(f"iteration 1: {said} tie: ") for reason in reasons)
    del run.rows[1].figures["mean_reward"]
    assert verdict(run).reasons == reasons, "before the evaluation"


@pytest.fixture
def record(store, tmp_path):
    """A run of one iteration with all its steps but the suite's, which failed, and what follows."""
    record = RunRecord(store, "small")
    folder = tmp_path / "suite"
    suite = {"prompts": str(folder / "prompts.jsonl")}
    record.save_config(RunConfig(name="small", iterations=1, suites={"right": suite}))
    for name in [step.name for step in unread_steps(record.config())]:
        recorded(record, name)
    failed = "iteration-1/evaluate/suite-right/score/0"
    cause = f"{failed}: the oracle raised KeyError: 'x'"
    recorded(record, failed, state="failed", message=f"{cause}\nremedy")
    (record.path / "steps" / "iteration-1~evaluate~suite-right.json").unlink()
    return record


def attempted(record, state, **changes):
    """An attempt at the run, the only one."""
    folder = record.path / "attempts"
    folder.mkdir(exist_ok=True)
    attempt = {"id": "one", "state": state, "started": 0.0, "host": "elsewhere", "pid": 1}
    (folder / "one.json").write_text(json.dumps(attempt | changes))


def test_a_failed_run_is_bad_whatever_its_models_are(record):
    attempted(record, "failed", ended=3.0)
    result = verdict(summarise(record))
    number = len(unread_steps(record.config()))
    assert result.tone == "bad"
    assert result.sentence.startswith(
        f"The run is not complete (failed): {number - 2} of {number} steps are done. Go on with "
        f"`geb resume small --store {record.store.location}`. So far: "
    )
    assert result.reasons[:2] == (
        "failed: iteration-1/evaluate/suite-right/score/0: the oracle raised KeyError: 'x'",
        "steps that have not begun: 1",
    )


def test_a_run_that_was_killed_is_bad_and_one_at_work_is_open(record):
    for host, tone, start in (
        ("elsewhere", "open", "The run is at work: "),
        (socket.gethostname(), "bad", "The run is not complete (crashed): "),
    ):
        attempted(record, "running", host=host)
        result = verdict(summarise(record))
        assert (result.tone, result.sentence[: len(start)]) == (tone, start)


def test_a_damaged_artifact_is_named_and_makes_the_report_fail(record, geb_here):
    for name in [step.name for step in unread_steps(record.config())]:
        recorded(record, name)
    attempted(record, "completed", ended=3.0)
    artifact = checkpoint_artifact(record.store, "one")
    recorded(record, "iteration-1/train", key=artifact.manifest.key)
    (artifact.path / "manifest.json").write_text("{}")
    with pytest.warns(DamagedRecordWarning, match=r"iteration-1/train: damaged artifact"):
        result = verdict(summarise(record))
    assert result.tone == "bad"
    assert result.sentence.startswith("Artifacts are damaged, and figures are missing here. ")
    assert result.reasons[0].startswith("iteration-1/train: damaged artifact")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, output = geb_here("report", "small", "--store", record.store.location)
    assert code == 1
    assert "warning iteration-1/train: damaged artifact" in output
    assert "Artifacts are damaged" in (record.path / "report.html").read_text()


def test_the_page_lists_the_settings_and_needs_no_network(store, tmp_path):
    run = summary(tmp_path, promoted=None)
    record = RunRecord(store, "small")
    record.save_config(run.config)
    page = Path(write(record, run)).read_text()
    assert "beta: 0.5" in page.split("Every setting")[1]
    assert "https://" not in page.replace("https://…", ""), "no network"


def test_the_base_s_figures_come_from_the_first_evaluation_there_is(tmp_path):
    rewards = {"mean_reward": 0.625, "base_mean_reward": 0.25, "compared_prompts": 2}
    figures = rewards | {"tied_prompts": 0, "win_rate": 1.0}
    folder = tmp_path / "evaluate"
    evaluated = write_evaluation(folder, {"a": [0.75], "b": [0.5]}, {"a": [0.25]}, figures)
    artifacts = {"iteration-2/evaluate": evaluated}
    late = Summary("late", RunConfig(iterations=2), "store", artifacts=artifacts)
    late.rows = [iteration_row(late, iteration) for iteration in range(3)]
    assert late.last_iteration == 2
    assert "the base's 0.250" in verdict(late).sentence
