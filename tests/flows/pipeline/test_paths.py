"""One store and the same paths for every command, whatever folder it is called from."""

import os

import pytest
import yaml

from flows.execution.run_record import RunRecord
from flows.pipeline import external
from flows.pipeline.config import RunConfig
from flows.pipeline.external import resolve
from flows.pipeline.inputs import resolve_model
from flows.pipeline.loading import load_config
from flows.standing.home import Home, Standing
from stages.contract.errors import UserError
from stages.contract.request import FileInput, HubInput
from stages.store.opening import open_store
from tests.flows.loop import geb_json, geb_ok, write_config
from tests.programs import run_program


def written(folder, values):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_every_path_of_a_file_starts_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    interpreters = {"generate": "../env/bin/python", "score": "python3", "train": "/opt/python"}
    docker = {"mounts": {"data": "ro"}}
    values = {
        "store": "../store",
        "inputs": {"prompts": "none.jsonl", "policy": "owner/model", "oracle_code": "oracle.py"},
        "execution": {"interpreters": interpreters, "docker": docker},
    }
    config = load_config(written(tmp_path / "deep", values))
    assert config.store == str(tmp_path / "store")
    assert config.inputs.prompts == (str(tmp_path / "deep/none.jsonl"),), "it need not be there"
    assert config.inputs.policy == "owner/model"
    assert config.execution.interpreters == {
        "generate": str(tmp_path / "env/bin/python"),
        "score": "python3",
        "train": "/opt/python",
    }
    assert list(config.execution.docker.mounts) == [str(tmp_path / "deep/data")]


def test_a_hub_id_in_a_file_stays_one_in_every_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(external, "_resolve_revision", lambda *_: "a" * 40)
    (tmp_path / "models/policy").mkdir(parents=True)
    (tmp_path / "models/policy/config.json").write_text("{}")
    config = load_config(written(tmp_path / "deep", {"inputs": {"policy": "models/policy"}}))
    monkeypatch.chdir(tmp_path)
    assert isinstance(resolve(config.inputs.policy, "model"), HubInput)
    store = open_store(str(tmp_path / "store"), create=True)
    assert isinstance(resolve_model("models/policy", store), FileInput), "a command names it so"


def test_paths_of_the_command_line_start_in_the_present_folder(tmp_path, monkeypatch):
    path = written(tmp_path / "deep", {"name": "x"})
    monkeypatch.chdir(tmp_path)
    config = load_config(
        path, ["inputs.prompts=mine.jsonl", "execution.interpreters={score: env/bin/python}"]
    )
    assert config.inputs.prompts == (str(tmp_path / "mine.jsonl"),)
    assert config.execution.interpreters == {"score": str(tmp_path / "env/bin/python")}
    assert config.store == str(tmp_path / "store"), "the default store, as of all commands"


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_commands_that_start_and_read_runs_name_the_store_alike(tmp_path, how):
    config = write_config(tmp_path)
    other = tmp_path / "other"
    flag, variable = {
        "flag": (["--store", str(other)], {}),
        "variable": ([], {"GEB_STORE": str(other)}),
    }[how]
    geb_ok("plan", config, *flag, "--json", **variable)
    assert (other / "store.json").exists()
    assert not (tmp_path / "store").exists(), "the configuration's own store"
    RunRecord(open_store(str(other)), "small").save_config(RunConfig(name="small"))
    assert list(geb_json("status", *flag, **variable)) == ["small"]


def test_set_wins_over_the_variable(tmp_path):
    mine = tmp_path / "mine"
    geb_ok(
        *("plan", write_config(tmp_path), "--set", f"store={mine}"),
        GEB_STORE=str(tmp_path / "other"),
    )
    assert (mine / "store.json").exists()
    assert not (tmp_path / "other").exists()


def test_a_run_s_record_is_a_configuration_for_the_same_run(tmp_path, monkeypatch):
    config = load_config(write_config(tmp_path)).for_processors()
    record = RunRecord(open_store(config.store, create=True), config.name)
    record.save_config(config)
    monkeypatch.chdir("/")
    changed = load_config(record.path / "config.json", ["train.micro_batch_tokens=64"])
    train = config.train.model_copy(update={"micro_batch_tokens": 64})
    assert changed.to_json() == config.model_copy(update={"train": train}).to_json()


def test_wrong_settings_of_file_and_command_line_are_named(tmp_path):
    path = written(tmp_path, {"train": {"beta": -1}})
    with pytest.raises(UserError) as caught:
        load_config(path, ["train.kapa=1"])
    assert str(path) in caught.value.message.splitlines()[0]
    assert "  train.kapa: no such setting; did you mean" in caught.value.message
    assert "  train.beta: Input should be greater than 0" in caught.value.message


def test_a_list_takes_one_value(tmp_path):
    path = written(tmp_path, {"tracking": {"report_to": "tensorboard"}})
    assert load_config(path).tracking.report_to == ("tensorboard",)
    for value, trackers in (("wandb", ("wandb",)), ("[mlflow, wandb]", ("mlflow", "wandb"))):
        config = load_config(path, [f"tracking.report_to={value}"])
        assert config.tracking.report_to == trackers


def test_a_server_is_named_to_a_shell_whatever_its_home_is_called(tmp_path):
    kept = tmp_path / "a home" / "password"
    kept.parent.mkdir()
    kept.write_text("geb:secret")
    up = Standing(pid=1, ui="u", api="http://a", store="s", password_file=str(kept))
    shown = run_program("bash", "-c", f'{up.exports}; echo "$PREFECT_API_AUTH_STRING"')
    assert shown.stdout == "geb:secret\n"


def test_a_home_is_its_user_s_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        home = Home(tmp_path / "home")
        assert home.claim()
    finally:
        os.umask(before)
    assert home.path.stat().st_mode & 0o777 == 0o700
