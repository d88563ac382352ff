"""Settings of the steps of several iterations."""

import pytest

from flows.pipeline.algorithm import resolve_run
from flows.pipeline.loading import load_config
from tests.flows.loop import ROOT


def steps_of(*overrides):
    config = load_config(ROOT / "configs/quickstart.yaml", ["iterations=3", *overrides])
    return {step.name: step for step in resolve_run(config).steps}


def test_more_iterations_ask_the_first_ones_for_the_same():
    prompts = ["prepare.prompts_per_iteration=100", "prepare.test_prompts=16"]
    three, five = steps_of(*prompts), steps_of(*prompts, "iterations=5")
    assert set(three) < set(five)
    for name in set(three) - {"prepare"}:
        assert three[name] == five[name], name


def test_each_shard_gets_its_place():
    steps = steps_of("generate.num_shards=2")
    params = [steps[f"iteration-1/generate/{shard}"].params.model_dump() for shard in (0, 1)]
    assert [(param["shard_index"], param["num_shards"]) for param in params] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("override", "name"), [("name=nightly", "nightly"), ("model=m", "m")])
def test_checkpoints_have_the_model_s_name_or_the_run_s(override, name):
    params = steps_of(override)["iteration-2/promote"].params
    assert (params.model_name, params.iteration) == (name, 2)
