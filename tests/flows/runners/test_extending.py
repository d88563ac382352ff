"""A toy stage and a toy runner, added as CONTRIBUTING says, and the places that it names."""

import importlib.metadata
import io
import re
from dataclasses import replace
from itertools import islice
from typing import ClassVar

import pytest

import stages.prepare.run
from flows.execution.plan import plan
from flows.execution.step_executor import StepExecutor
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.config import RunConfig, StageResources
from flows.pipeline.loading import load_config
from flows.pipeline.placement import RUNNERS
from flows.pipeline.step import Output, Step
from flows.pipeline.steps import Steps
from flows.runners.images import image_tags
from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.contract.params import InputSpec, OutputSpec, StageParams
from stages.contract.request import Request, Resources
from stages.harness.program import Stage, execute
from stages.tables.schemas import PROMPTS, num_rows, read_rows, write_table
from tests.flows.loop import ROOT, write_config
from tests.flows.runners.bucket_sync.hosts import Done, Host

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


class ToyParams(StageParams):
    """The first prompts of a table."""

    stage: ClassVar[str] = "toy"
    version: ClassVar[str] = "1"
    inputs = {"prompts": InputSpec()}
    outputs = {"first.parquet": OutputSpec("prompts")}

    count: int = 5
    """Prompts that stay."""


def run_toy(ctx):
    rows = islice(read_rows(ctx.path("prompts"), PROMPTS), ctx.params.count)
    write_table(ctx.out / "first.parquet", PROMPTS, rows)


class ToyResources(StageResources):
    """Resources of each stage."""

    toy: Resources = Resources()
    """Resources of each call of `toy`."""


class ToyConfig(RunConfig):
    """A run with one more stage."""

    toy: ToyParams = ToyParams()
    """The first prompts."""
    resources: ToyResources = ToyResources()
    """Resources of each stage."""


def toy(self, iteration, prompts):
    params = self.config.toy
    return self.add(f"iteration-{iteration}/toy", params, {"prompts": [prompts]})


def algorithm(steps, start):
    prompts = steps.prepare()
    kept = steps.toy(1, prompts.at("iteration-1.parquet")).at("first.parquet")
    steps.toy(2, kept)


class ToyPlace:
    """Stages in this process."""

    name = "toy"
    stages: ClassVar = {"prepare": stages.prepare.run.STAGE, "toy": Stage(ToyParams, run_toy)}

    requests: ClassVar[list[Request]] = []

    def __init__(self, execution):
        self.requests.clear()

    find = Host.find

    def start(self, job):
        self.requests.append(job.request)
        execute(self.stages[job.request.stage], job.request, Emitter(io.StringIO()))
        return Done()


@pytest.fixture
def toy_run(tmp_path, monkeypatch):
    monkeypatch.setitem(RUNNERS, "toy", f"{__name__}:ToyPlace")
    monkeypatch.setattr(Steps, "toy", toy, raising=False)
    monkeypatch.setattr("flows.pipeline.algorithm.iterative_geb", algorithm)
    monkeypatch.setattr("flows.pipeline.loading.RunConfig", ToyConfig)
    config = load_config(write_config(tmp_path, toy={"count": 3}), ["resources.toy.cpus=2"])
    assert isinstance(config, ToyConfig)
    return config.model_copy(
        update={"execution": config.execution.model_copy(update={"runner": "toy"})}
    )


def test_a_stage_and_a_runner_are_what_contributing_says(toy_run):
    assert [(line.stage, line.action) for line in plan(resolve_run(toy_run))] == [
        ("prepare", "run"),
        ("toy", "run"),
        ("toy", "run"),
    ]
    session = StepExecutor(toy_run)
    artifacts = {}
    for step in resolve_run(toy_run).steps:
        artifacts[step.name] = session.execute(step, artifacts).artifact
    assert num_rows(artifacts["iteration-2/toy"].file("first.parquet")) == 3
    assert {line.action for line in plan(resolve_run(toy_run))} == {"reuse"}
    # Image, resources and --from follow from the declarations.
    request = ToyPlace.requests[-1]
    tags = image_tags(request.image, gpus=request.resources.gpus)
    assert tags == [f"geb-core:{importlib.metadata.version('geb')}"]
    assert request.resources.cpus == 2
    lines = plan(resolve_run(toy_run, "iteration-2/toy"))
    assert [line.action for line in lines] == ["reuse", "reuse", "again"]


def test_what_comes_of_a_step_is_computed_again_in_whatever_suite(toy_run):
    run = resolve_run(toy_run)
    prepare, first, second = run.steps
    twin = replace(first, name="twin/toy")
    kept = {"prompts": [Output("twin/toy", ToyParams, "first.parquet")]}
    reader = Step("twin/reader", ToyParams(count=1), kept)
    steps = (prepare, twin, reader, first, second)
    artifacts = {}
    for step in steps:
        artifacts[step.name] = StepExecutor(toy_run).execute(step, artifacts).artifact
    run = replace(run, steps=steps, from_step="iteration-1/toy")
    assert [line.action for line in plan(run)] == ["reuse", "again", "again", "again", "again"]


def test_what_comes_of_an_artifact_that_is_gone_is_computed_again(toy_run):
    run = resolve_run(toy_run, "iteration-1/toy")
    executor = StepExecutor(toy_run)
    executor.record.save_config(run.config)
    artifacts = {}
    for step in run.steps:
        artifacts[step.name] = executor.execute(step, artifacts).artifact
    manifest = artifacts["iteration-1/toy"].manifest
    executor.store.set_aside(manifest.stage, manifest.key)
    assert [line.action for line in plan(run)] == ["reuse", "run", "again"]


# The place that docs/operations.md shows: it starts stages as child processes of this one.
PAGE = (ROOT / "docs/operations.md").read_text()
[CHILDREN] = [
    block
    for block in re.findall(r"^```python\n([^`]*)^```", PAGE, re.M)
    if "class Children" in block
]


def install(site, package):
    """Installs a package that brings the runner `children`."""
    info = site / f"{package}-1.dist-info"
    info.mkdir(parents=True)
    (site / f"{package}.py").write_text(CHILDREN)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[geb.runners]\nchildren = {package}:Children\n")


def test_a_runner_that_two_packages_bring_is_refused(tmp_path, monkeypatch):
    for package in ("children", "offspring"):
        install(tmp_path / "site", package)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(UserError, match="2 packages"):
        load_config(write_config(tmp_path), ["execution.runner=children"])


def test_a_runner_of_another_package_is_an_entry_point(tmp_path, monkeypatch):
    site = tmp_path / "site"
    install(site, "children")
    monkeypatch.syspath_prepend(str(site))
    settings = ["execution.runner=children", "execution.runner_settings={queue: a}"]
    chosen = load_config(write_config(tmp_path), settings)
    executor = StepExecutor(chosen)
    step = next(iter(resolve_run(chosen).steps))
    artifact = executor.execute(step, {}).artifact
    executor.stop()
    [log] = executor.store.log_path(artifact.manifest.stage, artifact.manifest.key).glob("*.log")
    assert "{'queue': 'a'}" in log.read_text()


SECTIONS = dict(re.findall(r"^## (Add an? .+)\n((?:(?!## ).*\n)*)", CONTRIBUTING, re.MULTILINE))
# What there is, to look for the places of something new.
EXAMPLES = {"Add a stage": "screen", "Add a runner": "docker"}
# Folders and files by their paths from the root of the repository.
PLACE = re.compile(r"`((?:stages|flows|tests|docs)/[^` ]+|pyproject\.toml)`")


def places(section, name):
    """Places that a section of CONTRIBUTING names in its numbered list, `<name>` filled in."""
    items = re.findall(r"^\d\. .*\n(?:   .*\n)*", SECTIONS[section], re.MULTILINE)
    return {place.replace("<name>", name) for item in items for place in PLACE.findall(item)}


@pytest.mark.parametrize("section", SECTIONS)
def test_contributing_names_places_that_exist_and_at_most_ten(section):
    assert len(SECTIONS) >= 4
    named = places(section, EXAMPLES.get(section, ""))
    assert 0 < len(named) <= 10
    assert not [place for place in named if not (ROOT / place).exists()]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("Add a stage", r"\bscreen\b|\bScreenParams\b"),
        (
            "Add a runner",
            r'runners\.docker\.(container|place|options)|DockerSettings|(?<!\[)"docker"',
        ),
    ],
)
def test_nothing_else_knows_of_a_stage_or_a_runner(section, words):
    named = places(section, EXAMPLES[section])
    sources = [path for folder in ("flows", "stages") for path in (ROOT / folder).rglob("*.py")]
    knowing = {
        path.relative_to(ROOT).as_posix() for path in sources if re.search(words, path.read_text())
    }
    assert not [path for path in knowing if not path.startswith(tuple(named))]
