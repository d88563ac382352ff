"""Three iterations: the policy, the reference and the pairs that each of them reads."""

import pytest

from flows.pipeline.algorithm import resolve_run
from flows.pipeline.loading import load_config
from flows.pipeline.step import Output, Step
from tests.flows.loop import ROOT, inputs
from tests.tiny_models import make_tiny_llama

BASE = "sft:checkpoint"
TRAINED = [f"iteration-{iteration}/train:checkpoint" for iteration in (1, 2, 3)]
PAIRS = [f"iteration-{iteration}/pair:pairs.parquet" for iteration in (1, 2, 3)]

REFERENCES = {
    "previous": [BASE, TRAINED[0], TRAINED[1]],
    "initial": [BASE, BASE, BASE],
    "2": [BASE, BASE, TRAINED[1]],
}
"""Reference of training in each iteration, by ``train.reference``."""

PAIR_DATA = {
    "current": [[PAIRS[0]], [PAIRS[1]], [PAIRS[2]]],
    "accumulate": [PAIRS[:1], PAIRS[:2], PAIRS[:3]],
}
"""Pairs of training in each iteration, by ``pair_data``."""


def steps_of(*overrides: str) -> dict[str, Step]:
    config = load_config(ROOT / "configs/quickstart.yaml", ["iterations=3", *overrides])
    return {step.name: step for step in resolve_run(config).steps}


@pytest.mark.parametrize("pair_data", PAIR_DATA)
@pytest.mark.parametrize("reference", REFERENCES)
def test_each_iteration_starts_from_the_one_before_it(reference, pair_data):
    steps = steps_of(f"train.reference={reference}", f"pair_data={pair_data}")
    for index, policy in enumerate([BASE, *TRAINED[:2]]):
        place = f"iteration-{index + 1}"
        assert inputs(steps[f"{place}/generate/0"]) == {
            "policy": [policy],
            "prompts": [f"prepare:{place}.parquet"],
        }
        assert inputs(steps[f"{place}/train"]) == {
            "policy": [policy],
            "reference": [REFERENCES[reference][index]],
            "pairs": PAIR_DATA[pair_data][index],
        }


@pytest.mark.parametrize("reference", ["previous", "initial"])
def test_an_adapter_goes_on_over_the_base_that_it_began_with(reference):
    steps = steps_of(f"train.reference={reference}", "train.lora={rank: 2, save: adapter}")
    for index in range(3):
        place, before = f"iteration-{index + 1}", TRAINED[:index][-1:]
        policy = {"policy": [BASE]} | ({"adapter": before} if before else {})
        worn = {"reference_adapter": before} if before and reference == "previous" else {}
        assert inputs(steps[f"{place}/generate/0"]) == policy | {
            "prompts": [f"prepare:{place}.parquet"]
        }
        assert inputs(steps[f"{place}/train"]) == policy | worn | {
            "reference": [BASE],
            "pairs": [PAIRS[index]],
        }
        assert inputs(steps[f"{place}/evaluate/generate/0"]) == {
            "policy": [BASE],
            "adapter": [TRAINED[index]],
            "prompts": ["prepare:test.parquet"],
        }
        assert inputs(steps[f"{place}/promote"])["checkpoint"] == [TRAINED[index]]


def test_a_given_policy_is_the_base_or_what_a_warm_start_trains(tmp_path):
    policy = make_tiny_llama(tmp_path / "policy")
    [given] = steps_of(f"inputs.policy={policy}")["sft"].inputs["policy"]
    assert not isinstance(given, Output)
    steps = steps_of(f"inputs.policy={policy}", "inputs.warm_start=null")
    assert "sft" not in steps
    [given] = steps["base/generate/0"].inputs["policy"]
    assert not isinstance(given, Output)
    assert steps["iteration-1/generate/0"].inputs["policy"] == [given]
    assert steps["iteration-1/train"].inputs["policy"] == [given]
    assert steps["iteration-1/train"].inputs["reference"] == [given]
    assert inputs(steps["iteration-2/train"])["policy"] == TRAINED[:1]


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
    assert steps_of(override)["iteration-2/promote"].params.model_dump()["model_name"] == name
