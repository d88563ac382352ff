"""`geb export`: a registered model outside of the store."""

import json
import re

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from flows.commands.cli import app
from flows.report.model_card import export_model
from stages.contract.errors import UserError
from stages.contract.manifest import Manifest, describe_files
from stages.contract.request import HubInput
from stages.store.opening import open_store
from stages.store.registry import ModelRegistry
from tests.damage import no_room
from tests.flows.loop import geb_ok, geb_refused, steps
from tests.stage_calls import checkpoint_artifact


def test_an_exported_model_is_the_checkpoint_with_its_card(finished, tmp_path):
    store = finished.parent / "store"
    geb_ok("export", "small@production", tmp_path / "model", "--store", store)
    key = steps(store)["iteration-1/train"]["key"]
    checkpoint = store / "artifacts/train" / key / "checkpoint"
    for path in checkpoint.iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()
    card = ModelCard.load(tmp_path / "model/README.md")
    assert card.data.library_name == "transformers"
    assert card.data.base_model is None, "the base is not a model of the hub"
    origin, figures, settings = documents(card)
    assert [policy["key"] for policy in origin["policies"]] == [steps(store)["sft"]["key"]]
    registered = ModelRegistry(open_store(str(store))).find("small:1")
    assert origin["digest"] == registered.checkpoint.digest
    evaluated = store / "artifacts/evaluate" / steps(store)["iteration-1/evaluate"]["key"]
    metrics = json.loads((evaluated / "metrics.json").read_text())
    assert figures["mean_reward"] == metrics["mean_reward"]
    trained = store / "artifacts/train" / key / "manifest.json"
    assert settings == json.loads(trained.read_text())["params"]
    again = geb_refused("export", "small:1", tmp_path / "model", "--store", store)
    assert "is there and not empty" in again


def test_models_with_an_alias_are_listed_first(store):
    registry = ModelRegistry(store)
    for name in ("kappa-s0", "nightly"):
        registry.register(
            name, checkpoint_artifact(store, name).ref("checkpoint"), metrics={}, measured_by="it"
        )
    registry.set_alias("nightly", "production", 1)
    shown = CliRunner().invoke(app, ["models", "--store", store.location]).output
    assert shown.index("nightly") < shown.index("kappa-s0")


def test_a_name_alone_is_not_promoted(store):
    registry = ModelRegistry(store)
    for number in (1, 2):
        trained = checkpoint_artifact(store, f"number {number}")
        registry.register("chat", trained.ref("checkpoint"), metrics={}, measured_by="it")
    registry.set_alias("chat", "production", 1)
    for name in ("chat", "chat:", "chat@"):
        refused = CliRunner().invoke(app, ["promote", name, "--store", store.location])
        assert isinstance(refused.exception, UserError), name
    refused = CliRunner().invoke(app, ["promote", "chat", "--store", store.location])
    assert "chat:2" in refused.exception.remedy
    CliRunner().invoke(app, ["promote", "chat@latest", "--store", store.location])
    assert registry.find("chat").version == 2


def documents(card):
    """The JSON documents of a card: origin, figures, settings."""
    return [json.loads(text) for text in re.findall(r"```json\n(.*?)```", card.content, re.DOTALL)]


HUB = HubInput(repo="owner/model", revision="c0ffee")


def trained(store, key, policy, *files):
    """An artifact of `train` whose files hold their own names."""
    scratch = store.new_scratch("train", key)
    for name in files:
        (scratch / name).parent.mkdir(exist_ok=True)
        (scratch / name).write_text(name + key)
    manifest = Manifest(
        stage="train",
        version="1",
        key=key,
        params={},
        seed=0,
        inputs={"policy": (policy,)},
        run="hub",
        step="iteration-1/train",
        files=describe_files(scratch),
        started="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:00:01+00:00",
        software={},
        host="here",
        accelerator="cpu",
    )
    return store.publish(scratch, manifest)


def test_the_card_names_the_hub_s_model_at_the_start_of_all(store, tmp_path):
    first = trained(store, "1" * 64, HUB, "checkpoint/config.json")
    second = trained(store, "2" * 64, first.ref("checkpoint"), "checkpoint/config.json")
    ModelRegistry(store).register("many", second.ref("checkpoint"), metrics={})
    export_model(store, "many", tmp_path / "model")
    card = ModelCard.load(tmp_path / "model/README.md")
    assert card.data.base_model == "owner/model"
    assert card.data.tags == ["dpo", "rlhf"]
    policies = [policy["digest"] for policy in documents(card)[0]["policies"]]
    assert policies == [first.ref("checkpoint").digest, HUB.digest]


def test_an_export_without_room_leaves_no_folder(store, tmp_path):
    artifact = trained(store, "1" * 64, HUB, "checkpoint/config.json", "checkpoint/more.json")
    ModelRegistry(store).register("tiny", artifact.ref("checkpoint"), metrics={})
    new, empty = tmp_path / "new", tmp_path / "empty"
    empty.mkdir()
    for folder in (new, empty):
        with pytest.raises(OSError) as caught, no_room():
            export_model(store, "tiny", folder)
        assert caught.value.filename is not None, "the command line names it"
    assert not new.exists()
    assert list(empty.iterdir()) == []
    export_model(store, "tiny", new)
    assert (new / "README.md").exists()
