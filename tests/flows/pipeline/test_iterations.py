"""Three iterations: the policy, the reference and the pairs that each of them reads."""

import pytest

from flows.pipeline.algorithm import resolve_run
from flows.pipeline.loading import load_config
from tests.flows.loop import ROOT, inputs

BASE = "sft:checkpoint"
TRAINED = [f"iteration-{iteration}/train:checkpoint" for iteration in (1, 2, 3)]
PAIRS = [f"iteration-{iteration}/pair:pairs.parquet" for iteration in (1, 2, 3)]

REFERENCES = {
    "previous": [BASE, TRAINED[0], TRAINED[1]],
    "initial": [BASE, BASE, BASE],
}
"""Reference of training in each iteration, by ``train.reference``."""

PAIR_DATA = {
    "current": [[PAIRS[0]], [PAIRS[1]], [PAIRS[2]]],
    "accumulate": [PAIRS[:1], PAIRS[:2], PAIRS[:3]],
}
"""Pairs of training in each iteration, by ``pair_data``."""


def steps_of(*overrides):
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
        assert steps[f"{place}/promote"].params.iteration == index + 1


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
