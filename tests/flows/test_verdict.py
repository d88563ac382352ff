"""The verdict of a report, and what stands around it."""

import json
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flows.execution.run_record import DamagedRecordWarning, RunRecord
from flows.pipeline.algorithm import step_names
from flows.pipeline.config import RunConfig
from flows.report.html import facts, write
from flows.report.plots import draw
from flows.report.summary import Summary, summarise
from flows.report.table import SuiteFigures
from flows.report.verdict import verdict
from stages.contract.manifest import Manifest
from stages.store.base import Artifact, Store
from tests.flows.evaluations import artifact_in, write_evaluation
from tests.flows.records import recorded
from tests.stage_calls import checkpoint_artifact


def summary(folder: Path, *, promoted: bool | None) -> Summary:
    """One iteration with 0.9 wins; its gates passed, failed, or were not asked yet."""
    artifacts: dict[str, Any] = {}
    if promoted is not None:
        gate = {"gate": "min_win_rate", "passed": promoted, "reason": "the win rate is 0.9"}
        decision = {"promoted": promoted, "aliases": ["production"], "gates": [gate]}
        (folder / "decision.json").write_text(json.dumps(decision))
        artifacts["iteration-1/promote"] = artifact_in(folder)
    rows = [
        {"iteration": 0, "mean_reward": 0.5, "components": {}},
        {
            "iteration": 1,
            "mean_reward": 0.75,
            "win_rate": 0.9,
            "tied_prompts": 3,
            "components": {},
            "intervals": {"win_rate": (0.85, 0.95), "mean_reward": (0.7, 0.8)},
        },
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
def test_the_verdict_is_one_sentence_with_its_interval(
    tmp_path: Path, promoted: bool | None, tone: str, end: str
) -> None:
    found = verdict(summary(tmp_path, promoted=promoted))
    assert found.tone == tone
    assert found.sentence.startswith(
        "After 1 iteration the model scores above its base on 90.0 % (95 % interval 85.0 to "
        "95.0 %) of the held-out prompts (3 tie); its mean reward is 0.750 [0.700, 0.800]"
    )
    assert found.sentence.endswith(end)
    assert found.reasons == (("the win rate is 0.9",) if promoted is False else ())
    bare = summary(tmp_path, promoted=None)
    bare.rows[1] = {"iteration": 1, "mean_reward": None, "components": {}}
    assert verdict(bare).sentence == "No iteration has been evaluated yet."


def test_doubts_of_a_training_are_in_verdict_and_facts(tmp_path: Path) -> None:
    run = summary(tmp_path, promoted=None)
    trained = {"cautions": ["rounding left 0.21 of the update"], "update_kept": 0.21}
    (tmp_path / "summary.json").write_text(json.dumps(trained))
    fields = {"key": "0" * 64, "seconds": 1.0, "software": {}, "host": "here", "accelerator": "cpu"}
    fields |= {"ended": "2026-01-01T00:00:00+00:00"}
    manifest = cast(Manifest, SimpleNamespace(**fields))
    run.artifacts["iteration-1/train"] = Artifact(tmp_path, manifest)
    assert verdict(run).cautions == ("training of iteration 1: rounding left 0.21 of the update",)
    assert ("update kept in the saved weights", "0.21") in facts(run)


def test_the_verdict_says_how_far_to_trust_it(tmp_path: Path) -> None:
    metrics = {"compared_prompts": 64, "truncated_share": 0.125, "base_truncated_share": 0.0}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    found = summary(tmp_path, promoted=None)
    found.artifacts["iteration-1/evaluate"] = artifact_in(tmp_path)
    base, now = found.rows
    base |= {"components": {"right": 1.0, "polite": 0.5}, "mean_log_pi_ref": -10.0}
    now |= {"components": {"right": 0.975, "polite": 0.75}, "mean_log_pi_ref": -12.5}
    now["intervals"]["components.right"] = (0.94, 1.0)
    suites = [{"iteration": 0, "components": {}, "mean_reward": 0.5, "solved": {"accuracy": 0.25}}]
    suites += [{"iteration": 1, "components": {}, "mean_reward": 0.4, "solved": {"accuracy": 0.5}}]
    found.suites.append(SuiteFigures("sums", suites))
    assert verdict(found).cautions == (
        "one training seed, 64 held-out prompts; `geb sweep --seeds` tries other seeds",
        "right fell from 1.000 to 0.975 [0.940, 1.000]",
        "suite sums, mean reward fell from 0.500 to 0.400",
        "12.5 % of the answers are cut off, of the base's 0.0 %",
        "log π_ref of the answers moved from -10.00 to -12.50 nats",
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
def test_a_verdict_names_iterations_whose_pairs_nearly_all_tie(
    tmp_path: Path, ties: str, figures: dict[str, int], said: str | None
) -> None:
    found = summary(tmp_path, promoted=True)
    found.config = RunConfig.model_validate({"iterations": 1, "pair": {"ties": ties}})
    found.rows[1] |= figures
    reasons = verdict(found).reasons
    assert len(reasons) == (said is not None)
    assert all(each.startswith(f"iteration 1: {said} tie: ") for each in reasons)
    found.rows[1]["win_rate"] = None
    assert verdict(found).reasons == reasons, "before the evaluation"


@pytest.fixture
def record(store: Store, tmp_path: Path) -> RunRecord:
    """A run of one iteration with all its steps but the suite's, which failed, and what follows."""
    record = RunRecord(store, "small")
    folder = tmp_path / "suite"
    suite = {"prompts": str(folder / "prompts.jsonl")}
    record.save_config(RunConfig(name="small", iterations=1, suites={"right": suite}))
    for name in step_names(record.config()):
        recorded(record, name)
    failed = "iteration-1/evaluate/suite-right/score/0"
    cause = f"{failed} (train {'0' * 12}): the oracle raised KeyError: 'x'"
    recorded(record, failed, state="failed", message=f"{cause}\nremedy")
    (record.path / "steps" / "iteration-1~evaluate~suite-right.json").unlink()
    return record


def test_a_failed_run_is_bad_whatever_its_models_are(record: RunRecord) -> None:
    found = verdict(summarise(record))
    number = len(step_names(record.config()))
    assert found.tone == "bad"
    assert found.sentence.startswith(
        f"The run failed: {number - 2} of {number} steps are done. Go on with "
        f"`geb resume small --store {record.store.location}`. So far: "
    )
    assert found.reasons[:2] == (
        "iteration-1/evaluate/suite-right/score/0 failed: the oracle raised KeyError: 'x'",
        "1 step has not begun",
    )


def test_the_page_lists_a_suite_s_own_settings_alone(record: RunRecord) -> None:
    page = Path(write(record, summarise(record), [])).read_text()
    settings = page.split("<h2>Configuration</h2>")[1].split("<details>")[0]
    assert "<code>suites.<wbr>right.<wbr>prompts</code>" in settings
    assert "suites.<wbr>right.<wbr>prepare" not in settings, "all of it is at its default"


def test_a_run_that_was_killed_is_bad_and_one_at_work_is_open(record: RunRecord) -> None:
    attempts = record.path / "attempts"
    attempts.mkdir()
    attempt = {"id": "one", "state": "running", "started": 0.0, "host": "elsewhere", "pid": 1}
    for host, tone, start in (
        ("elsewhere", "open", "The run is at work: "),
        (socket.gethostname(), "bad", "The run was killed: "),
    ):
        (attempts / "one.json").write_text(json.dumps(attempt | {"host": host}))
        found = verdict(summarise(record))
        assert (found.tone, found.sentence[: len(start)]) == (tone, start)


def test_a_damaged_artifact_is_named_and_makes_the_report_fail(
    record: RunRecord, geb_here: Callable[..., tuple[int, str]]
) -> None:
    for name in step_names(record.config()):
        recorded(record, name)
    artifact = checkpoint_artifact(record.store, "one")
    recorded(record, "iteration-1/train", key=artifact.manifest.key)
    (artifact.path / "manifest.json").write_text("{}")
    with pytest.warns(DamagedRecordWarning, match=r"iteration-1/train: damaged artifact"):
        found = verdict(summarise(record))
    assert found.tone == "bad"
    assert found.sentence.startswith("1 artifact is damaged, and figures are missing here. ")
    assert found.reasons[0].startswith("iteration-1/train: damaged artifact")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, said = geb_here("report", "small", "--store", record.store.location)
    assert code == 1
    assert "iteration-1/train: damaged artifact" in said
    assert "1 artifact is damaged" in (record.path / "report.html").read_text()


def test_the_page_lists_the_settings_that_differ_and_needs_no_network(tmp_path: Path) -> None:
    found = summary(tmp_path, promoted=None)
    for row in found.rows:
        row |= {"solved": {}}
    record = RunRecord(Store.open(str(tmp_path / "store"), create=True), "small")
    record.save_config(found.config)
    page = Path(write(record, found, [])).read_text()
    assert 'train.<wbr>beta</code></td><td class="text"><code>0.5</code>' in page
    assert "train.epochs" not in page.split("Every setting")[0]
    assert "https://" not in page.replace("https://…", ""), "no network"


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ([0.2, 0.3, 0.4], "gold falls from iteration 1 to iteration 2: 0.600 to 0.400, -0.200"),
        # Nothing is wrong if both fall.
        ([0.2, 0.3, 0.25], None),
    ],
)
def test_the_verdict_says_when_a_second_opinion_parts_from_the_reward(
    tmp_path: Path, reward: list[float], said: str | None
) -> None:
    found = summary(tmp_path, promoted=None)
    second = {"gold": {"score": {"oracle": "math_verify"}, "after": "each"}}
    found.config = RunConfig(iterations=2, suites=second)
    metrics = {"compared_prompts": 9, "truncated_share": 0.0, "base_truncated_share": 0.0}
    gold: list[float] = [0.5, 0.6, 0.4]
    samples = [{f"p{n}": [mean] for n in range(9)} for mean in gold]
    for t in (1, 2):
        place = f"iteration-{t}/evaluate"
        own = write_evaluation(tmp_path / str(t), samples[t], samples[0], metrics)
        found.artifacts[place] = own
        written = write_evaluation(tmp_path / f"gold-{t}", samples[t], samples[0])
        found.artifacts[f"{place}/suite-gold"] = written
    plain = {"components": {}, "solved": {}, "mean_log_pi_ref": None}
    found.rows = [plain | {"iteration": t, "mean_reward": reward[t]} for t in range(3)]
    rows = [plain | {"iteration": t, "mean_reward": gold[t]} for t in range(3)]
    found.suites.append(SuiteFigures("gold", rows))
    told = [each for each in verdict(found).cautions if "gold falls" in each]
    assert len(told) == (said is not None)
    assert all(str(said) in each for each in told)
    assert "The reward trained for, and second opinions" in [each.title for each in draw(found)]


def test_the_correlation_of_several_rewards_is_among_the_facts(tmp_path: Path) -> None:
    found = {"reward_correlations": [["right", "polite", -0.25], ["right", "score", 1.0]]}
    (tmp_path / "metrics.json").write_text(json.dumps(found))
    made = {"key": "0" * 64, "seconds": 1.0, "software": {}, "host": "here", "accelerator": "cpu"}
    made |= {"ended": "2026-01-01T00:00:00+00:00"}
    paired = Artifact(tmp_path, cast(Manifest, SimpleNamespace(**made)))
    summary = Summary("r", RunConfig(), "store", rows=[], artifacts={"iteration-1/pair": paired})
    shown = dict(facts(summary))["correlation of rewards"]
    assert shown == "right with polite -0.25, right with score +1.00"
