"""The form of the Prefect UI, and what is made of what a person fills in."""

import datetime

import jsonschema
import pytest
from prefect.utilities.callables import parameter_schema

from flows.evaluate import evaluate
from flows.iterate import iterate
from flows.pipeline.config import RunConfig
from flows.pipeline.form import LONG_NAMES, RunForm
from flows.pipeline.presets import chosen_store, configured, fresh_run, preset_names
from flows.sweep import sweep
from stages.contract.errors import UserError
from tests.flows.loop import ROOT

FLOWS = (iterate, evaluate, sweep)


def form(flow):
    """The schema that Prefect's UI makes the form of, and its server checks parameters with."""
    return dict(parameter_schema(flow).model_dump_for_openapi())


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_every_field_has_its_name_its_help_and_no_value(flow):
    config = form(flow)["properties"]["config"]
    fields = config["properties"]
    assert {"kappa", "policy", "iterations", "runner", "settings"} <= fields.keys()
    assert len(fields) < 20, "a form that one takes in at a glance"
    for name, field in fields.items():
        assert field["title"] == name
        assert field["description"], name
        assert "default" not in field, name
        assert field.get("type") != "boolean", f"{name}: the UI's switch has no empty position"
        assert "$ref" not in str(field), name


@pytest.mark.parametrize("name", LONG_NAMES)
def test_a_field_s_place_is_in_the_configuration(name):
    section, field = LONG_NAMES[name].split(".")
    assert field in RunConfig.model_fields[section].annotation.model_fields
    assert name in RunForm.model_fields


def test_runs_of_a_sweep_have_no_name_and_no_seed_of_the_form():
    shown = [form(flow)["properties"]["config"]["properties"] for flow in (iterate, sweep)]
    assert [{"name", "seed"} <= properties.keys() for properties in shown] == [True, False]


def test_presets_are_the_shipped_configurations_of_runs():
    shown = form(iterate)["properties"]["preset"]
    assert shown["default"] == shown["enum"][0] == "quickstart"
    paper = {path.stem for path in (ROOT / "configs/paper").glob("*.yaml")}
    assert paper < set(shown["enum"])


def test_lines_of_settings_override_the_form_s_fields():
    lines = ["train.beta=0.3", "train.kappa=2"]
    filled_in = {"kappa": 0.5, "design": "arctanh", "divergence": "0.5", "settings": lines}
    filled_in |= {"promote": {"min_win_rate": None}}
    jsonschema.validate({"config": filled_in}, form(iterate))
    config = configured("quickstart", filled_in)
    train = config.train
    assert (train.kappa, train.beta, train.design) == (2.0, 0.3, "arctanh")
    assert train.divergence == 0.5
    assert config.promote.min_win_rate is None
    assert train.nll_weight == 2.0, "the preset's"
    assert configured("quickstart", {"store": "/one", "settings": ["store=/two"]}).store == "/two"


SHOWN = [
    {"kappa": "much"},
    {"design": "thorough"},
    {"oracle": "delphi"},
    {"iterations": 0},
    {"settings": "train.beta=0.3"},
]
NOT_SHOWN = [
    {"divergence": "wasserstein"},
    {"train": {"kapa": 1}},
    {"train": {"iteration": 2}},
    {"promote": {"max_regression": "perhaps"}},
    {"settings": ["train.betta=0.3"]},
    {"settings": ["train"]},
]


@pytest.mark.parametrize("wrong", [*SHOWN, *NOT_SHOWN], ids=str)
def test_wrong_values_are_refused_by_the_run_or_by_the_form(wrong):
    if wrong in SHOWN:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"config": wrong}, form(iterate))
    else:
        jsonschema.validate({"config": wrong}, form(iterate))
    with pytest.raises(UserError):
        configured("quickstart", wrong)


def test_the_store_is_the_named_one_or_the_environment_s(monkeypatch):
    monkeypatch.setenv("GEB_STORE", "/srv/store")
    for store, named in (("/srv/store", ""), ("/other", "/other")):
        assert chosen_store(named) == store
        assert configured("quickstart", {"store": named} if named else {}).store == store


def test_a_user_s_folder_replaces_the_presets(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("name: mine\nseed: 7\n")
    monkeypatch.setenv("GEB_CONFIGS", str(tmp_path))
    assert preset_names() == ["mine"]
    assert configured("mine", {}).seed == 7
    with pytest.raises(UserError, match="no preset is named 'other'"):
        configured("other", {})


SATURDAY = datetime.datetime(2026, 11, 21, 2, 0, 0, tzinfo=datetime.UTC)
IN_TOKYO = SATURDAY.astimezone(datetime.timezone(datetime.timedelta(hours=9)))
SUNDAY = SATURDAY + datetime.timedelta(days=1)


def test_each_start_has_a_dated_name_and_a_seed_and_one_model():
    first = fresh_run(RunConfig(name="nightly", seed=3), SATURDAY)
    second = fresh_run(RunConfig(name="nightly", seed=3), SUNDAY)
    assert (first.name, first.seed) == ("nightly-20261121-020000", 20261121020003)
    assert (second.name, second.seed) == ("nightly-20261122-020000", 20261122020003)
    assert first.model == second.model == "nightly"
    assert RunConfig.model_validate_json(first.to_json()) == first


def test_the_same_start_is_the_same_run_in_every_time_zone():
    config = RunConfig(name="nightly", model="shop")
    assert fresh_run(config, SATURDAY) == fresh_run(config, IN_TOKYO)
    assert fresh_run(config, SATURDAY).model == "shop"


def test_the_longest_name_stays_a_name():
    named = fresh_run(RunConfig(name="n" * 100), SATURDAY)
    assert len(named.name) == 100
    assert named.name.endswith("-20261121-020000")


def test_what_differs_between_runs_of_a_task_stands_first():
    config = form(iterate)["properties"]["config"]["properties"]
    shown = sorted(config, key=lambda name: config[name]["position"])
    assert shown[:4] == ["name", "seed", "iterations", "kappa"]
    assert shown[-1] == "settings"


def test_settings_that_are_null_are_none():
    assert configured("quickstart", {"settings": None}) == configured(
        "quickstart", {"settings": []}
    )
