"""Wrongly wired pipelines, refused before anything starts; a stage that leaves out an output."""

import io
from typing import ClassVar

import pytest

from flows.pipeline.steps import Steps
from stages.contract.errors import GebError
from stages.contract.events import Emitter
from stages.contract.params import OutputSpec, StageParams
from stages.contract.request import make_request
from stages.harness.program import Stage, execute
from tests.flows.loop import write_config

# What there is, by the stage that is called wrongly.
KNOWN = {
    "train": "inputs of train: policy, reference, pairs",
    "score": "outputs of generate: responses.parquet, metrics.json",
}


@pytest.mark.parametrize(
    ("stage", "wrong", "said"),
    [
        ("train", lambda inputs: {"polcy": inputs["policy"]}, "has no input 'polcy'"),
        ("train", lambda inputs: {"policy": []}, "lacks its input 'policy'"),
        ("train", lambda inputs: {"policy": inputs["policy"] * 2}, "reads one 'policy'"),
        ("score", lambda inputs: {"responses": [inputs["responses"][0].at("x")]}, "no output 'x'"),
    ],
)
def test_a_wrong_wiring_is_refused_by_the_plan(stage, wrong, said, tmp_path, monkeypatch, geb_here):
    right = Steps.add

    def add(self, name, params, inputs, *more, **options):
        changes = wrong(inputs) if params.stage == stage else {}
        return right(self, name, params, {**inputs, **changes}, *more, **options)

    monkeypatch.setattr(Steps, "add", add)
    code, output = geb_here("plan", write_config(tmp_path))
    assert code == 64, output
    assert said in output
    assert KNOWN[stage] in output


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
