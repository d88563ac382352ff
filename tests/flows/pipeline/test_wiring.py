"""Wrongly wired pipelines, refused before anything starts; a stage that leaves out an output."""

import dataclasses
import io
from typing import Any, ClassVar

import pytest

from flows.pipeline.steps import Steps
from stages.contract.errors import GebError
from stages.contract.events import Emitter
from stages.contract.params import OutputSpec, StageParams
from stages.contract.request import make_request
from stages.harness.program import Stage, execute
from tests.flows.loop import write_config

Inputs = dict[str, Any]
# What there is, by the stage that is called wrongly.
KNOWN = {
    "train": "inputs of train: policy, reference, pairs",
    "score": "outputs of generate: responses.parquet, metrics.json",
}


def misspelt(inputs: Inputs) -> Inputs:
    return {"polcy" if name == "policy" else name: group for name, group in inputs.items()}


def without_policy(inputs: Inputs) -> Inputs:
    return {name: group for name, group in inputs.items() if name != "policy"}


def two_policies(inputs: Inputs) -> Inputs:
    return inputs | {"policy": inputs["policy"] * 2}


def pairs_as_policy(inputs: Inputs) -> Inputs:
    return inputs | {"policy": inputs["pairs"]}


def other_file(inputs: Inputs) -> Inputs:
    return inputs | {"responses": [inputs["responses"][0].at("respones.parquet")]}


@pytest.mark.parametrize(
    ("builder", "change", "said"),
    [
        ("train", misspelt, "iteration-1/train: stage 'train' has no input 'polcy'"),
        ("train", without_policy, "stage 'train' lacks its input 'policy'"),
        ("train", two_policies, "stage 'train' reads one 'policy', and is given 2"),
        ("train", pairs_as_policy, "stage 'train' reads 'policy' as model, and is given pairs"),
        ("score", other_file, "stage 'generate' has no output 'respones.parquet'"),
    ],
)
def test_a_wrong_wiring_is_refused_by_the_plan(
    builder, change, said, tmp_path, monkeypatch, geb_here
):
    right = getattr(Steps, builder)

    def wrong(self, *arguments):
        step = right(self, *arguments)
        return dataclasses.replace(step, inputs=change(dict(step.inputs)))

    monkeypatch.setattr(Steps, builder, wrong)
    code, output = geb_here("plan", write_config(tmp_path))
    assert code == 64, output
    assert said in output
    assert KNOWN[builder] in output


class LazyParams(StageParams):
    stage: ClassVar[str] = "lazy"
    version: ClassVar[str] = "1"
    outputs = {"checkpoint": OutputSpec("model"), "ema": OutputSpec("model", optional=True)}


def test_an_artifact_without_a_declared_output_is_not_published(store):
    request = make_request(LazyParams(), inputs={}, seed=0, store=str(store.root))

    def run(ctx):
        (ctx.out / "checkpoints/model").mkdir(parents=True)
        (ctx.out / "log.txt").write_text("busy")

    with pytest.raises(GebError, match=r"'lazy' ended without its output 'checkpoint'"):
        execute(Stage(LazyParams, run), request, Emitter(io.StringIO()))
    assert store.load("lazy", request.key) is None
