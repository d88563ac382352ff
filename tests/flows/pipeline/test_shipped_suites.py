"""Shipped suites: what they ask for before a run, and the steps that they make."""

import re
import sys

import pytest

from flows.pipeline.algorithm import resolve_run
from flows.pipeline.loading import load_config, load_overridden
from stages.contract.errors import UserError
from tests.flows.loop import ROOT

FOLDER = ROOT / "configs/suites"
COMMIT = "0" * 40
# What a person has to choose in each file, and a commit where the hub would be asked for one.
CHOSEN = {
    "math": {"olympiadbench.prompts": f"Hothan/OlympiadBench@{COMMIT}"},
    "ifeval": {},
    "alpaca-eval": {"alpaca_eval.score.judge.model": "mine"},
    "arena-hard": {"arena_hard.score.judge.model": "mine"},
    "ultrafeedback": {"ultrafeedback.prompts": f"RLHFlow/test_generation_2k@{COMMIT}"},
    "coherence": {
        "coherence.prompts": f"RLHFlow/ultrafeedback_iter3@{COMMIT}",
        "coherence.score.judge.model": "mine",
    },
}


def steps(tmp_path, name, *overrides):
    chosen = [f"suites.{place}={value}" for place, value in CHOSEN[name].items()]
    config = load_config(extended(tmp_path, name), [*chosen, *overrides])
    return {step.name: step for step in resolve_run(config).steps}


def extended(tmp_path, name):
    """A person's configuration that takes a shipped suite in."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"extends: [{ROOT / 'configs/quickstart.yaml'}, {FOLDER / f'{name}.yaml'}]\n"
        "sft: {architecture: {max_position_embeddings: 8192}}\n"
    )
    return path


def test_every_shipped_suite_is_tested():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(CHOSEN)


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_pinned_is_pinned_to_a_commit(tmp_path, name):
    text = (FOLDER / f"{name}.yaml").read_text()
    for revision in re.findall(r"prompts: \S+@(\S+)", text):
        assert re.fullmatch("[0-9a-f]{40}", revision), "a branch moves"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("coherence", "suites.coherence.score.judge.model is JUDGE"),
        ("alpaca-eval", "suites.alpaca_eval.score.judge.model is JUDGE"),
    ],
)
def test_what_a_person_has_to_choose_is_asked_for_before_any_stage(tmp_path, name, message):
    with pytest.raises(UserError, match=re.escape(message)):
        resolve_run(load_config(extended(tmp_path, name)))


@pytest.mark.parametrize(
    ("name", "suite", "oracle", "inputs"),
    [
        ("math", "math500", "math_verify", {"responses"}),
        ("math", "olympiadbench", "math_verify", {"responses"}),
        ("ifeval", "ifeval", "python", {"responses", "code"}),
        # The baseline is in the prompts.
        ("alpaca-eval", "alpaca_eval", "judge", {"responses"}),
        ("arena-hard", "arena_hard", "judge", {"responses", "opponents"}),
        ("coherence", "coherence", "judge", {"responses", "code"}),
    ],
)
def test_a_suite_is_scored_by_its_oracle(tmp_path, name, suite, oracle, inputs):
    # The environment that a suite names need not be here.
    here = f"execution.interpreters.score={sys.executable}"
    step = steps(tmp_path, name, here)[f"iteration-3/evaluate/suite-{suite}/score/0"]
    assert step.params.model_dump()["oracle"] == oracle
    assert set(step.inputs) == inputs


def test_suite_with_another_oracle_takes_no_threshold_of_the_run():
    changes = {
        "evaluation": {"correct_from": 1.0, "pass_at_k": [1]},
        "suites": {"math": {"score": {"oracle": "math_verify"}}, "own": {"prompts": "x.jsonl"}},
    }
    config = load_overridden(ROOT / "configs/quickstart.yaml", changes, (), "test")
    assert config.for_suite("own").evaluation.correct_from == 1.0
    assert config.for_suite("math").evaluation.correct_from is None
    assert config.for_suite("math").evaluation.pass_at_k == ()
