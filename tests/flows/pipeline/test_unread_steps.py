"""Steps of a run whose inputs are not read: the same as with them, without their content."""

from typing import Any

from flows.pipeline.algorithm import resolve_run, unread_steps
from flows.pipeline.loading import load_overridden
from flows.pipeline.step import Source, Step
from stages.contract.request import FileInput, HubInput
from tests.flows.loop import ROOT
from tests.tiny_models import make_tiny_llama

QUICKSTART = ROOT / "configs/quickstart.yaml"
PROMPTS = ROOT / "data/quickstart/prompts.jsonl"


def without_content(source: Source) -> Source | str:
    return source.location if isinstance(source, FileInput) else source


def shown(step: Step) -> tuple[Any, ...]:
    inputs = {name: [*map(without_content, group)] for name, group in step.inputs.items()}
    # A promotion holds a digest of the oracle and of the prompts, which depends on their content.
    params = step.params.model_copy(update={"measured_by": ""})
    return step.name, params, inputs, step.seed


def test_unread_steps_equal_the_run_s(tmp_path):
    code = tmp_path / "oracle.py"
    code.write_text("def score(prompts, responses, references): ...\n")
    judged = {
        "oracle": "judge",
        "judge": {"mode": "pairwise", "model": "j", "url": "http://x/v1", "against": "reference"},
    }
    suites = {
        "own": {"prompts": str(PROMPTS), "after": "each"},
        "coded": {"prompts": str(PROMPTS), "score": {"oracle": "python"}, "oracle_code": str(code)},
        "judged": {"prompts": str(PROMPTS), "score": judged},
    }
    changes = {
        "iterations": 2,
        "screen": {"num_samples": 2},
        "inputs": {"test_prompts": str(PROMPTS)},
        "suites": suites,
    }
    config = load_overridden(QUICKSTART, changes, "test")
    steps = resolve_run(config).steps
    assert [*map(shown, unread_steps(config))] == [*map(shown, steps)]


def test_without_a_warm_start_they_begin_with_the_policy(tmp_path):
    policy = make_tiny_llama(tmp_path / "policy")
    changes = {"inputs": {"policy": str(policy), "warm_start": None}}
    config = load_overridden(QUICKSTART, changes, "test")
    assert [*map(shown, unread_steps(config))] == [*map(shown, resolve_run(config).steps)]


def test_names_of_the_hub_stand_for_models_and_for_data():
    changes = {
        "inputs": {
            "policy": "owner/model",
            "warm_start": None,
            "prompts": ["owner/data@abc"],
            "oracle_model": "owner/reward@v1",
        },
        "score": {"oracle": "reward_model"},
        "suites": {
            "own": {
                "prompts": "owner/questions@def",
                "score": {"oracle": "reward_model"},
                "oracle_model": "owner/other@v2",
            }
        },
    }
    steps = {step.name: step for step in unread_steps(load_overridden(QUICKSTART, changes, "test"))}
    [policy] = steps["base/generate/0"].inputs["policy"]
    [prompts] = steps["prepare"].inputs["train"]
    [model] = steps["base/score/0"].inputs["model"]
    assert policy == HubInput(repo="owner/model", revision="main", repo_type="model")
    assert prompts == HubInput(repo="owner/data", revision="abc", repo_type="dataset")
    assert model == HubInput(repo="owner/reward", revision="v1", repo_type="model")
    [of_suite] = steps["base/suite-own/score/0"].inputs["model"]
    assert of_suite == HubInput(repo="owner/other", revision="v2", repo_type="model")
