"""Damaged records of a store: every command says in one message which, where, and what to do."""

import json
import shutil

import pytest

from flows.execution.run_record import RunRecord
from flows.pipeline.loading import load_config
from stages.store.base import Store
from stages.store.registry import ModelRegistry
from tests.flows.loop import ROOT
from tests.flows.records import recorded
from tests.stage_calls import checkpoint_artifact

COMMANDS = (
    "status",
    "status nightly",
    "resume nightly --dry-run",
    "models",
    "promote tiny:1",
    "verify",
    "gc",
)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "garbled": lambda path: path.write_bytes(b"\xff\xfe\x00garbage"),
    "other": lambda path: path.write_text('{"format": "x", "train": 5}'),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A store with a run, a step and a model with an alias; and the model's key."""
    root = tmp_path_factory.mktemp("healthy") / "store"
    store = Store.in_folder(str(root), create=True)
    artifact = checkpoint_artifact(store, "one")
    record = RunRecord(store, "nightly")
    quickstart = ROOT / "configs/quickstart.yaml"
    record.save_config(load_config(quickstart, [f"store={root}", "name=nightly"]))
    recorded(record, "iteration-1/train", key=artifact.manifest.key, state="failed")
    attempt = record.path / "attempts/1.json"
    attempt.parent.mkdir(exist_ok=True)
    attempt.write_text("{}")
    registry = ModelRegistry(store)
    for name in ("one", "two"):
        checkpoint = checkpoint_artifact(store, name)
        version = registry.register("tiny", checkpoint.ref("checkpoint"), metrics={})
        registry.set_alias("tiny", "production", version.version)
    return root, artifact.manifest.key


@pytest.fixture
def store(healthy, tmp_path):
    shutil.copytree(healthy[0], tmp_path / "store", copy_function=shutil.copy2)
    return tmp_path / "store"


@pytest.fixture
def geb(store, healthy, geb_here):
    """Runs a command on the store."""
    return lambda words: geb_here(*words.format(key=healthy[1]).split(), "--store", store)


def test_every_command_is_content_with_the_whole_store(geb):
    for command in COMMANDS:
        code, output = geb(command)
        assert code == 0, (command, output)


def test_settings_that_have_gone_hinder_only_a_resume(store, geb):
    path = store / "runs/nightly/config.json"
    values = json.loads(path.read_text())
    values["train"]["gone"] = 5
    values["train"]["lora"] = {"rank": 4, "gone": "deeply"}
    path.write_text(json.dumps(values))
    for command in ("report nightly", "status nightly", "gc"):
        code, output = geb(command)
        assert code == 0, (command, output)
    code, output = geb("status nightly --json")
    assert json.loads(output)["nightly"]["waiting"], "steps are known by the configuration"
    code, output = geb("resume nightly --dry-run")
    assert code == 64
    assert "train.lora.gone: no such setting" in output
    assert "geb run CONFIG" in output


def test_a_store_that_is_not_there_is_the_persons_mistake(store, geb):
    store.rename(store.with_name("elsewhere"))
    for command in COMMANDS:
        code, output = geb(command)
        assert code == 64, (command, output)
        assert f"no store at {store}" in output
        assert "remedy" in output
    assert not store.exists()


# By record: commands that need it, and some that do without it, at most with a warning.
RECORDS = {
    "store.json": (("status", "gc"), ()),
    "runs/nightly/config.json": (("resume nightly --dry-run",), ("status nightly", "gc")),
    "runs/nightly/steps/iteration-1~train.json": (("gc",), ("status", "status nightly")),
    "runs/nightly/attempts/1.json": ((), ("status", "status nightly")),
    "models/tiny.json": (("models", "promote tiny:1", "gc"), ("status", "verify")),
}


# The command line prints it.
@pytest.mark.filterwarnings("always::flows.execution.run_record.DamagedRecordWarning")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("record", RECORDS)
def test_a_damaged_record_is_named_with_its_place_and_the_remedy(store, geb, record, damage):
    path = store / record
    DAMAGES[damage](path)
    concerned, indifferent = RECORDS[record]
    for command in concerned:
        code, output = geb(command)
        assert len(output) < 3000
        assert code == 64, (command, output)
        assert "remedy" in output
        assert str(path) in output or "of format x" in output
    for command in indifferent:
        code, output = geb(command)
        assert code == 0, (command, output)


def test_a_copy_of_a_run_with_a_name_of_no_run_is_left_out(store, geb):
    shutil.copytree(store / "runs/nightly", store / "runs/nightly (copy)")
    for command in COMMANDS:
        code, output = geb(command)
        assert code == 0, (command, output)
        assert "(copy)" not in output
    assert "runs there: nightly" in geb("status another")[1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_found_and_stops_nothing_else(store, geb, healthy, damage):
    [path] = store.glob(f"artifacts/*/{healthy[1]}/manifest.json")
    DAMAGES[damage](path)
    for command in ("verify", "promote tiny:1", "status nightly", "gc"):
        code, output = geb(command)
        if command in ("verify", "promote tiny:1"):
            assert code == 1, (command, output)
            assert "damaged" in output
            assert path.parent.parent.name in output
        else:
            assert code == 0, (command, output)
