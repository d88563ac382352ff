"""Steps of runs, written down once: names, stages, seeds and inputs of each,
and the steps that each waits for.

A seed or an input that changes on purpose gets a new line in ``golden_steps`` and one in
CHANGELOG.md: what is computed again, and why.
"""

from pathlib import Path

import pytest

from flows.pipeline.algorithm import resolve_run, unread_steps
from flows.pipeline.loading import load_config
from flows.pipeline.step import Output
from stages.contract.request import FileInput, HubInput
from tests.flows.loop import ROOT

GOLDEN = Path(__file__).with_name("golden_steps")
JUDGE = "judge: {mode: pairwise, model: j, url: http://x/v1}"
PROMPTS = f"{ROOT}/data/quickstart/prompts.jsonl"
# Three suites with prompts, and one that scores the run's samples once more.
SUITES = (
    f"suites.front={{prompts: {PROMPTS}, after: each}}",
    f"suites.math={{prompts: {PROMPTS}, score: {{oracle: math_verify}}}}",
    f"suites.coded={{prompts: {PROMPTS}, score: {{oracle: python}},"
    f" oracle_code: {ROOT}/data/chat/oracle.py}}",
    "suites.gold={score: {oracle: math_verify}, after: each}",
    "promote.suites_hold={gold: 0.0, front: 0.1}",
)
HUB = (
    "inputs={policy: owner/model, warm_start: null, prompts: [owner/data@abc],"
    " oracle_model: owner/reward@v1}",
    "score.oracle=reward_model",
    "suites.own={prompts: owner/questions@def, score: {oracle: reward_model},"
    " oracle_model: owner/other@v2}",
)
# Settings of each run.
RUNS = {
    "accumulate": (
        "iterations=3",
        "pair_data=accumulate",
        "screen.num_samples=2",
        "generate.num_shards=2",
    ),
    "initial-reference": ("train.reference=initial", f"inputs.test_prompts={PROMPTS}"),
    "judge": (
        f"score={{oracle: judge, {JUDGE}}}",
        f"inputs.oracle_code={ROOT}/stages/score/judge-pairwise.jinja",
        "generate.num_shards=2",
    ),
    "judge-in-a-sum": (
        f"score={{oracle: weighted, weighted: {{weights: {{judge: 1, python: 1}}}}, {JUDGE}}}",
    ),
    "suites": (*SUITES, "generate.num_shards=2"),
    "hub": HUB,
    "warm-start-of-a-policy": ("inputs.policy=owner/model",),
    "preferences": ("inputs.prompts=[]", f"inputs.preferences={ROOT}/pairs.jsonl"),
}


def shown(source):
    if isinstance(source, Output):
        return f"{source.step}:{source.path}" if source.path else source.step
    if isinstance(source, HubInput):
        return f"{source.repo_type}:{source.repo}@{source.revision}"
    assert isinstance(source, FileInput)
    return Path(source.location).relative_to(ROOT).as_posix()


def line(step):
    groups = [f"{name}={','.join(map(shown, group))}" for name, group in step.inputs.items()]
    if step.after:
        groups.append(f"after={','.join(step.after)}")
    return " ".join([step.name, step.stage, str(step.seed), *sorted(groups)])


def config_of(name):
    return load_config(ROOT / "configs/quickstart.yaml", ("iterations=2", *RUNS[name]))


@pytest.mark.parametrize("name", RUNS)
def test_steps_seeds_and_inputs_are_as_written_down(name):
    steps = unread_steps(config_of(name))
    assert [line(step) for step in steps] == (GOLDEN / f"{name}.txt").read_text().splitlines()


def without_content(step):
    # A promotion holds a digest of the oracle and of the prompts, which depends on their content.
    return line(step), step.params.model_copy(update={"measured_by": ""})


@pytest.mark.parametrize(
    "name", sorted(RUNS.keys() - {"hub", "preferences", "warm-start-of-a-policy"})
)
def test_steps_whose_inputs_are_not_read_are_the_run_s(name):
    config = config_of(name)
    read = [without_content(step) for step in resolve_run(config).steps]
    assert [without_content(step) for step in unread_steps(config)] == read
