"""Steps of a run, written down once: names, stages, seeds and inputs of each,
and the steps that each waits for.

A seed or an input that changes on purpose gets a new line in ``golden_steps.txt`` and one in
CHANGELOG.md: what is computed again, and why.
"""

from pathlib import Path

from flows.pipeline.algorithm import resolve_run
from flows.pipeline.loading import load_config
from flows.pipeline.step import Output, Source, Step
from stages.contract.request import FileInput
from tests.flows.loop import ROOT

GOLDEN = Path(__file__).with_name("golden_steps.txt")
OVERRIDES = (
    "iterations=2",
    "pair_data=accumulate",
    "screen.num_samples=2",
    "generate.num_shards=2",
)


def shown(source: Source) -> str:
    if isinstance(source, Output):
        return f"{source.step}:{source.path}" if source.path else source.step
    assert isinstance(source, FileInput)
    return Path(source.location).relative_to(ROOT).as_posix()


def line(step: Step) -> str:
    groups = [f"{name}={','.join(map(shown, group))}" for name, group in step.inputs.items()]
    if step.after:
        groups.append(f"after={','.join(step.after)}")
    return " ".join([step.name, step.stage, str(step.seed), *sorted(groups)])


def test_steps_seeds_and_inputs_are_as_written_down():
    steps = resolve_run(load_config(ROOT / "configs/quickstart.yaml", OVERRIDES)).steps
    assert [line(step) for step in steps] == GOLDEN.read_text().splitlines()
