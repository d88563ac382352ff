"""Absurd settings of every field: refused by the field's name."""

import math
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from flows.execution.plan import plan
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from stages.contract.errors import UserError
from tests.flows.loop import ROOT

QUICKSTART = ROOT / "configs/quickstart.yaml"
NUL = '"\\0"'
ABSURD = (
    "[[1], {a: 2}]",
    "{no_such_setting: 1}",
    ".nan",
    ".inf",
    "-1",
    "1e400",
    "null",
    NUL,
    "!!binary aGk=",
    f'"{"x" * 5000}"',
)


def fields(model, prefix=""):
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{prefix}{name}.")


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


# Resources are the same fields for every stage.
FIELDS = [
    name
    for name in fields(RunConfig)
    if not name.startswith("resources.") or name.startswith("resources.train")
]


@pytest.mark.parametrize("name", FIELDS)
def test_an_absurd_value_is_refused_by_name_or_is_one_of_the_field_s(name, tmp_path):
    defaults = tmp_path / "defaults.yaml"
    defaults.write_text("iterations: 1\n")
    accepted = 0
    for absurd in ABSURD:
        try:
            config = load_config(defaults, [f"{name}={absurd}"])
        except UserError as error:
            last = name.rpartition(".")[2]
            assert last in error.message, (absurd, error.message)
            assert len(error.message) < 3000
            assert error.remedy
        else:
            accepted += 1
            assert absurd != NUL
            # An accepted value reads back as it was written.
            again = RunConfig.model_validate_json(config.to_json())
            assert again.model_dump() == config.model_dump()
            value = value_of(config, name)
            assert not isinstance(value, float) or math.isfinite(value)
    assert accepted < len(ABSURD)


def test_a_setting_below_a_path_is_set():
    volumes = {
        name: load_config(
            QUICKSTART, [f"execution.kubernetes.volumes.{name}.{text}" for text in given]
        ).execution.kubernetes.volumes
        for name, given in {"/data": ["claim=a", "sub_path=b"], "here": ["claim=a"]}.items()
    }
    assert {path: volume.claim for path, volume in volumes["/data"].items()} == {"/data": "a"}
    assert volumes["/data"]["/data"].sub_path == "b"
    assert list(volumes["here"]) == [str(Path("here").absolute())]


@pytest.mark.parametrize(
    "execution",
    [
        "{runner: docker, interpreters: {generate: /opt/vllm/bin/python}}",
        f"{{interpreters: {{evaluate: {Path(sys.executable).name}}}}}",
    ],
    ids=["another machine's", "on the path"],
)
def test_an_interpreter_that_will_do(tmp_path, execution):
    assert plan(
        resolve_run(
            load_config(QUICKSTART, [f"store={tmp_path / 'store'}", f"execution={execution}"])
        )
    )
