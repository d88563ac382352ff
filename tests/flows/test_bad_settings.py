"""Absurd settings of every field: refused by the field's name."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flows.commands.common import forced_from
from flows.execution.plan import plan
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.pipeline.strict_yaml import unusable
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
    NUL,
    "!!binary aGk=",
    f'"{"x" * 5000}"',
)


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def value_of(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


# Resources are the same fields for every stage.
FIELDS = [
    name
    for name in leaves(RunConfig)
    if not name.startswith("resources.") or name.startswith("resources.train.")
]


@pytest.mark.parametrize("name", FIELDS)
def test_an_absurd_value_is_refused_by_name_or_is_one_of_the_field_s(
    name: str, tmp_path: Path
) -> None:
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
            assert list(unusable(config.model_dump())) == []
            # An accepted value reads back as it was written.
            assert RunConfig.model_validate_json(config.to_json()) == config
            value = value_of(config, name)
            assert not isinstance(value, float) or math.isfinite(value)
    assert accepted < len(ABSURD)


def test_a_setting_below_a_path_is_set() -> None:
    volumes = {
        name: load_config(
            QUICKSTART, [f"execution.kubernetes.volumes.{name}.{text}" for text in given]
        ).execution.kubernetes.volumes
        for name, given in {"/data": ["claim=a", "sub_path=b"], "here": ["claim=a"]}.items()
    }
    assert {path: volume.claim for path, volume in volumes["/data"].items()} == {"/data": "a"}
    assert volumes["/data"]["/data"].sub_path == "b"
    assert list(volumes["here"]) == [str(Path("here").absolute())]


@pytest.mark.parametrize("section", ["train", "generate.vllm", "execution", "resources.train"])
@pytest.mark.parametrize("value", ["5", "[1]", '"text"', "true", ".nan", "null"])
def test_a_section_that_is_none_is_refused(section: str, value: str) -> None:
    with pytest.raises(UserError, match=section.split(".")[-1]):
        load_config(QUICKSTART, [f"{section}={value}"])


@pytest.mark.parametrize(
    ("stage", "iteration", "said"),
    [
        ("train", 4, "--iteration 4: the run has iterations 1 to 3"),
        ("train", 0, "--iteration 0: the run has iterations 1 to 3"),
        (None, 2, "--iteration 2 without --from"),
        ("prepare", 2, "prepare runs once, before the iterations"),
        ("sft", 1, "sft runs once, before the iterations"),
        ("trane", 1, "--from trane: no such stage"),
        ("", None, "no such stage"),
    ],
)
def test_an_iteration_that_the_run_has_not_is_refused(
    stage: str | None, iteration: int | None, said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        forced_from(stage, iteration, iterations=3)
    assert caught.value.remedy


@pytest.mark.parametrize("interpreter", ["/nowhere/python", "no-such-python", "{file}"])
def test_a_missing_interpreter_is_found_by_the_plan(tmp_path: Path, interpreter: str) -> None:
    (tmp_path / "python").write_text("not executable")
    place = interpreter.format(file=tmp_path / "python")
    overrides = [f"store={tmp_path / 'store'}", f"execution.interpreters={{evaluate: {place}}}"]
    with pytest.raises(UserError, match="no Python interpreter at") as caught:
        plan(resolve_run(load_config(QUICKSTART, overrides)))
    assert place in caught.value.message
    assert "execution.interpreters" in caught.value.remedy


@pytest.mark.parametrize(
    "execution",
    [
        "{runner: docker, interpreters: {generate: /opt/vllm/bin/python}}",
        f"{{interpreters: {{evaluate: {Path(sys.executable).name}}}}}",
    ],
    ids=["another machine's", "on the path"],
)
def test_an_interpreter_that_will_do(tmp_path: Path, execution: str) -> None:
    assert plan(
        resolve_run(
            load_config(QUICKSTART, [f"store={tmp_path / 'store'}", f"execution={execution}"])
        )
    )


@pytest.mark.parametrize(
    "table",
    [
        "interpreters={{{}: python}}",
        "docker.images={{{}: image}}",
        "docker.network={{{}: host}}",
        "docker.environment={{{}: {{A: b}}}}",
        "docker.secrets={{{}: [TOKEN]}}",
    ],
)
def test_a_setting_for_a_stage_that_there_is_not_is_refused(table: str) -> None:
    with pytest.raises(UserError, match="names no stage: genrate; stages are prepare"):
        load_config(QUICKSTART, [f"execution.{table.format('genrate')}"])
    assert load_config(QUICKSTART, [f"execution.{table.format('generate')}"])


@pytest.mark.parametrize(
    ("oracle", "missing"),
    [
        ("python", "inputs.oracle_code"),
        ("reward_model", "inputs.oracle_model"),
        ("urm_gated", "inputs.oracle_model"),
        ("http", "url"),
        ("judge", "url"),
    ],
)
def test_an_oracle_without_what_it_needs_is_found_by_the_plan(
    tmp_path: Path, oracle: str, missing: str
) -> None:
    overrides = [
        f"store={tmp_path / 'store'}",
        f"score.oracle={oracle}",
        "inputs.oracle_code=null",
        "inputs.oracle_model=null",
    ]
    with pytest.raises(UserError, match=missing):
        plan(resolve_run(load_config(QUICKSTART, overrides)))
    assert not (tmp_path / "store/artifacts").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "http://user:SECRET@host/"}, "key_env"),
        ({"url": "https://:SECRET@host"}, "key_env"),
        ({"url": "file:///etc/passwd"}, "write http://HOST"),
        ({"url": "http://"}, "write http://HOST"),
        ({"url": "http://host:0"}, "write http://HOST"),
        ({"url": "http://host:99999"}, "Port out of range"),
        ({"url": ""}, "needs {0}.url"),
        ({"key_env": "GEB_NOT_SET"}, "{0}.key_env is 'GEB_NOT_SET'.* not set"),
    ],
)
@pytest.mark.parametrize("oracle", ["http", "judge"])
@pytest.mark.parametrize("place", ["score", "suites.extra.score"])
def test_a_server_s_address_and_key_are_looked_at_by_the_plan(
    tmp_path: Path, place: str, oracle: str, settings: dict[str, str], said: str
) -> None:
    section = {"url": "http://host", "model": "m"} | settings
    if oracle == "http":
        section["identity"] = section.pop("model")
    overrides = [f"store={tmp_path}", f"{place}={json.dumps({'oracle': oracle, oracle: section})}"]
    if place != "score":
        overrides.append(f"suites.extra.prompts={ROOT / 'data/quickstart/prompts.jsonl'}")
    with pytest.raises(UserError, match=said.format(oracle)) as caught:
        plan(resolve_run(load_config(QUICKSTART, overrides)))
    assert place in str(caught.value)
    assert "SECRET" not in f"{caught.value} {caught.value.remedy}"
