"""Keys: changes that give another one and changes that do not, for every stage's parameters."""

import importlib
import typing
from pathlib import Path
from typing import Literal

import pytest

import stages
from stages.contract.digests import derive_seed, prompt_id, sha256_of
from stages.contract.params import InputSpec, Settings, StageParams
from stages.contract.records import read_record
from stages.contract.request import (
    ArtifactInput,
    FileInput,
    HubInput,
    Request,
    Resources,
    make_request,
)
from stages.prepare.params import PrepareParams
from tests.stage_calls import stand_ins


def all_params():
    """The parameters of every stage folder."""
    classes = []
    for path in sorted(Path(stages.__file__).parent.glob("*/params.py")):
        if path.parent.name != "contract":
            module = importlib.import_module(f"stages.{path.parent.name}.params")
            classes += [
                var
                for var in vars(module).values()
                if isinstance(var, type)
                and issubclass(var, StageParams)
                and var.__module__ == module.__name__
                # Else it is what several stages have in common.
                and "stage" in vars(var)
            ]
    return classes


class Reader(StageParams):
    """A stage for tests of inputs."""

    stage = "reader"
    version = "1"
    inputs = {
        "data": InputSpec(optional=True, many=True),
        "other": InputSpec(optional=True, many=True),
        "model": InputSpec(optional=True),
    }


STAGES = all_params()
FILE = FileInput(location="/here/data.jsonl", digest="d1")


def key(params, *, seed=0, inputs=None, **more):
    given = stand_ins(params) if inputs is None else inputs
    return make_request(params, inputs=given, seed=seed, store="store", **more).key


def another(annotation, value):
    """Another value of a field, of its type where a parameter's type decides what is read."""
    if typing.get_origin(annotation) is dict:
        return {another(typing.get_args(annotation)[0], None): 1}
    literals = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
    return next((literal for literal in literals if literal != value), "another value")


def variants(settings):
    """(field, whether it affects the result, settings with that field changed)."""
    for name, field in type(settings).model_fields.items():
        extra = field.json_schema_extra
        affects = not (isinstance(extra, dict) and extra.get("affects_result") is False)
        value = getattr(settings, name)
        changes = [("", True, another(field.annotation, value))]
        if isinstance(value, Settings):
            changes = [(f".{inner}", *rest) for inner, *rest in variants(value)]
        for inner, inner_affects, changed in changes:
            both = settings.model_copy(update={name: changed})
            yield f"{name}{inner}", affects and inner_affects, both


def choices(params):
    """The parameters, and where some choose what others are read, with each of their values."""
    if not params.unused_fields():
        return [params]
    return [
        params.model_copy(update={name: value})
        for name, field in type(params).model_fields.items()
        for value in typing.get_args(field.annotation)
        if typing.get_origin(field.annotation) is Literal
    ]


def test_every_stage_folder_has_parameters():
    folders = {path.parent.name for path in Path(stages.__file__).parent.glob("*/params.py")}
    assert {stage.stage for stage in STAGES} == folders - {"contract", "objectives", "training"}
    assert len(STAGES) >= 6


# Not of its type, a value is written all the same.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.stage)
def test_each_field_is_in_the_key_or_only_about_speed(kind):
    used = set()
    for params in choices(kind()):
        unused = params.unused_fields()
        for name, affects, changed in variants(params):
            top = name.partition(".")[0]
            assert (key(changed) != key(params)) is (affects and top not in unused), name
            used |= {top} - unused
    assert used == settable(kind), "fields of which no other value was found, or unread"


def settable(kind):
    """Fields of a stage's parameters; a section without any setting has no other value."""
    return {
        name
        for name, field in kind.model_fields.items()
        if not (
            isinstance(field.annotation, type)
            and issubclass(field.annotation, Settings)
            and not field.annotation.model_fields
        )
    }


@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.stage)
def test_version_seed_and_inputs_are_in_the_key(kind):
    params = kind()
    newer = type(kind.__name__, (kind,), {"version": kind.version + "0", "__module__": __name__})
    same = key(params)
    assert key(newer.model_validate(params.model_dump())) != same
    assert key(params, seed=1) != same
    for name in kind.inputs:
        others = [[FILE.model_copy(update={"digest": digest})] for digest in ("d2", "d3")]
        keys = {key(params, inputs={**stand_ins(params), name: other}) for other in others}
        assert len({same, *keys}) == 3, name


OTHER_FILE = FILE.model_copy(update={"digest": "d2"})
MOVED_FILE = FILE.model_copy(update={"location": "/elsewhere/data.jsonl"})
MODEL = HubInput(repo="org/model", revision="abc")
TRAINED = ArtifactInput(stage="train", key="k1", path="checkpoint", digest="d")


def changed(model, **update):
    return {"model": [model.model_copy(update=update)]}


@pytest.mark.parametrize(
    ("inputs", "others"),
    [
        ({"data": [FILE]}, [{"data": [FILE, FILE]}, {"other": [FILE]}, {}]),
        ({"data": [FILE, OTHER_FILE]}, [{"data": [OTHER_FILE, FILE]}]),
        ({"model": [TRAINED]}, [changed(TRAINED, digest="e")]),
        ({"model": [MODEL]}, [changed(MODEL, revision="def"), changed(MODEL, repo="org/other")]),
    ],
    ids=["number-and-names", "order-of-shards", "content", "hub-model"],
)
def test_what_of_the_inputs_is_in_the_key(inputs, others):
    keys = {key(Reader(), inputs=given) for given in (inputs, *others)}
    assert len(keys) == 1 + len(others)


@pytest.mark.parametrize(
    ("inputs", "more"),
    [
        ({"data": [MOVED_FILE]}, {}),
        ({"data": [FILE]}, {"run": "nightly", "step": "iteration-1"}),
        ({"data": [FILE]}, {"resources": Resources(gpus=8, memory_gib=64)}),
    ],
    ids=["place", "labels", "resources"],
)
def test_place_and_labels_are_not_in_the_key(inputs, more):
    same = key(Reader(), inputs={"data": [FILE]})
    assert key(Reader(), inputs=inputs, **more) == same
    request = make_request(Reader(), inputs=inputs, seed=0, store="/other/store", **more)
    assert request.key == same


def test_known_digests():
    # Written down once: a change would make every artifact of every store stale.
    assert prompt_id([{"role": "user", "content": "hi"}]) == sha256_of([["user", "hi"]])[:32]
    # Written down: seeds of runs that were made before stay.
    assert derive_seed(1, "a", 2) == 4456642070398748380
    assert max(derive_seed(seed, "x") for seed in range(100)) > 2**62
    assert len({derive_seed(0, "a"), derive_seed(1, "a"), derive_seed(0, "b")}) == 3
    assert all(0 <= derive_seed(seed, "x") < 2**63 for seed in range(100))


def test_a_data_set_of_the_hub_is_prepared_where_its_library_is():
    file, dataset = FILE, HubInput(repo="o/d", revision="r", repo_type="dataset")
    images = [
        make_request(PrepareParams(), inputs={"train": [source]}, seed=0, store="store").image
        for source in (file, dataset)
    ]
    assert images == ["core", "torch"]


@pytest.mark.parametrize("kind", STAGES, ids=lambda kind: kind.stage)
def test_a_request_of_each_stage_is_read_as_it_was_made(kind, tmp_path):
    params = kind()
    request = make_request(params, inputs=stand_ins(params), seed=0, store="store")
    request.write(tmp_path / "request.json")
    assert read_record(tmp_path / "request.json", Request) == request
    assert kind.model_validate(request.params) == params
