"""`geb export` and `geb chat`: a registered model, used."""

import shutil
from pathlib import Path

import pytest

from flows.commands.store import fault_of_base
from flows.pipeline.inputs import resolve_model
from flows.report.model_card import base_of, export
from stages.contract.manifest import Manifest, describe_files
from stages.contract.request import ArtifactInput, FileInput, HubInput
from stages.store.base import Artifact, Store
from stages.store.registry import ModelRegistry
from tests.flows.loop import geb, geb_ok, geb_refused, started, steps
from tests.forking import forked_python
from tests.local_hub import serve_models
from tests.programs import run_program
from tests.small_disk import no_room


def test_an_exported_model_is_the_checkpoint_with_its_card(finished: Path, tmp_path: Path) -> None:
    store = finished.parent / "store"
    geb_ok("export", "small@production", tmp_path / "model", "--store", store)
    key = steps(store)["iteration-1/train"]["key"]
    checkpoint = store / "artifacts/train" / key / "checkpoint"
    for path in checkpoint.iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()
    card = (tmp_path / "model/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "base_model" not in card, "the base is no model of the hub"
    assert "of iterative online DPO with an exploratory bonus, made by" in card
    assert "tags: [dpo, rlhf, general-exploratory-bonus]\n" in card
    assert not (tmp_path / "model/adapter").exists(), "none was saved"
    for said in ("trained from scratch", "| mean reward |", "| win rate over", f"train {key[:12]}"):
        assert said in card
    for step in ("prepare", "sft", "iteration-1/generate/0", "iteration-1/score/0"):
        assert f"| small, {step} |" in card, "lineage"
    again = geb_refused("export", "small:1", tmp_path / "model", "--store", store)
    assert "is there and not empty" in again


def test_a_chat_shows_the_base_beside_the_policy(finished: Path) -> None:
    done = run_program(
        *(forked_python(), "-m", "flows.commands.cli", "chat", "small@production"),
        *("--store", finished.parent / "store", "--max-new-tokens", "4"),
        input="Please bring two cups to room 12.\n\nWe need two maps.\n",
    )
    assert done.returncode == 0, done.stderr
    names = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert names == ["small", "base"] * 2


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "me@home").mkdir()
    module = (forked_python(), "-m", "stages.generate.dialogue")
    done = run_program(*module, f"base={tmp_path / 'me@home'}", input="")
    assert done.returncode == 64
    assert f"{tmp_path}/me@home" in done.stderr, "an @ in a folder's name begins no revision"
    assert "remedy" in done.stderr
    assert "Traceback" not in done.stderr


HUB = HubInput(repo="owner/model", revision="c0ffee")


def trained(
    store: Store, key: str, policy: HubInput | FileInput | ArtifactInput, *files: str
) -> Artifact:
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
        inputs={"policy": [policy.model_dump(mode="json") | {"digest": policy.digest}]},
        run="hub",
        step="iteration-1/train",
        files=describe_files(scratch, set()),
        started="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:00:01+00:00",
        software={},
        host="here",
        accelerator="cpu",
        notes={},
    )
    return store.publish(scratch, manifest)


def test_adapters_beside_a_checkpoint_are_exported_with_the_name_of_their_base(
    store: Store, tmp_path: Path
) -> None:
    files = ("checkpoint/config.json", "adapter/adapter_config.json")
    first = trained(store, "1" * 64, HUB, *files)
    second = trained(store, "2" * 64, first.ref("checkpoint"), *files)
    base = base_of(store, first)
    assert (base.name, base.revision, base.folder) == ("owner/model", "c0ffee", None)
    bases = {
        1: "owner/model, revision c0ffee",
        2: f"many, version 1 (the `checkpoint` of train {'1' * 64})",
    }
    for number, artifact in enumerate((first, second), start=1):
        ModelRegistry(store).register("many", artifact.ref("checkpoint"), metrics={})
        folder = tmp_path / f"model-{number}"
        export(store, f"many:{number}", folder)
        for name in ("config.json", "adapter/adapter_config.json"):
            saved = artifact.path / ("checkpoint" if "/" not in name else "") / name
            assert (folder / name).read_bytes() == saved.read_bytes()
        assert f"for\nanother base than it: {bases[number]}." in (folder / "README.md").read_text()
        card = (folder / "adapter/README.md").read_text()
        assert f"\nBase: {bases[number]}." in card
        assert "of iterative online DPO, made by" in card, "these artifacts have no bonus"
        assert "tags: [dpo, rlhf, lora]\n" in card
        named = "\nbase_model: owner/model\n" in card and 'revision="c0ffee")' in card
        assert named == (number == 1), "only the first one's base is a model of the hub"


def test_an_export_for_which_there_is_no_room_leaves_no_folder(
    store: Store, tmp_path: Path
) -> None:
    made = trained(store, "1" * 64, HUB, "checkpoint/config.json", "checkpoint/more.json")
    ModelRegistry(store).register("tiny", made.ref("checkpoint"), metrics={})
    new, empty = tmp_path / "new", tmp_path / "empty"
    empty.mkdir()
    for folder in (new, empty):
        with pytest.raises(OSError) as caught, no_room():
            export(store, "tiny", folder)
        assert caught.value.filename is not None, "the command line names it"
    assert not new.exists()
    assert list(empty.iterdir()) == []
    export(store, "tiny", new)
    assert (new / "README.md").exists()


def test_an_adapter_in_a_checkpoints_place_is_exported_as_one_with_its_base(
    store: Store, tmp_path: Path
) -> None:
    files = ("checkpoint/adapter_config.json", "checkpoint/base.json")
    artifact = trained(store, "3" * 64, HUB, *files)
    ModelRegistry(store).register("kept", artifact.ref("checkpoint"), metrics={})
    export(store, "kept", tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        *("adapter_config.json", "base.json", "README.md")
    }
    card = (tmp_path / "model/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\nbase_model: owner/model\n")
    assert "Base of the adapters: owner/model, revision c0ffee." in card
    assert 'from_pretrained("owner/model", revision="c0ffee")' in card
    assert "--enable-lora" in card
    assert resolve_model("kept", store) == [HUB, artifact.ref("checkpoint")]


def test_an_adapter_whose_base_is_gone_or_an_empty_folder_is_damaged(
    store: Store, tmp_path: Path
) -> None:
    made = trained(store, "1" * 64, HUB, "checkpoint/config.json")
    files = ("checkpoint/adapter_config.json", "checkpoint/base.json")
    trained(store, "2" * 64, made.ref("checkpoint"), *files)
    assert geb("verify", "--store", store.root).returncode == 0
    shutil.rmtree(made.path)
    done = geb("verify", "--store", store.root)
    assert done.returncode == 1
    assert f"lacks its base: there is no train/{'1' * 12}" in " ".join(done.stdout.split())
    (tmp_path / "base").mkdir()
    base = FileInput(location=str(tmp_path / "base"), digest="0" * 64)
    other = trained(store, "3" * 64, base, *files)
    assert f"{base.location} is an empty folder" in str(fault_of_base(store, other.manifest))


def test_a_model_that_is_not_there_is_named(finished: Path, tmp_path: Path) -> None:
    for command in (["export", "nobody@production", tmp_path / "model"], ["chat", "nobody"]):
        said = geb_refused(*command, "--store", finished.parent / "store")
        assert "nobody" in said
        assert "small" in said, "those that there are"


TOKEN = "hf_of_a_test"


@pytest.fixture
def large(store: Store, tmp_path: Path) -> Path:
    """A store with the model `big`, of two large files and two small ones."""
    files = ("config.json", "a.safetensors", "b.safetensors", "tokenizer.json")
    made = trained(store, "4" * 64, HUB, *(f"checkpoint/{name}" for name in files))
    ModelRegistry(store).register("big", made.ref("checkpoint"), metrics={})
    return tmp_path / "store"


def push_arguments(store: Path, folder: Path, *more: str) -> list[str | Path]:
    return ["export", "big", folder, "--store", store, "--push", "me/big", *more]


def hub_environment(url: str, token: str = TOKEN) -> dict[str, str]:
    # Without Xet, whose server is another one: the client then uploads by LFS.
    return {"HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


def content_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_a_push_that_is_cut_off_goes_on_with_what_the_hub_lacks(
    large: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    with serve_models(TOKEN) as hub:
        hub.holds.set()
        arguments = push_arguments(large, folder, "--revision", "trial", "--private")
        with started(*arguments, **hub_environment(hub.url)) as process:
            assert hub.held.wait(timeout=120), "one large file is there, the other on its way"
            process.kill()
        [first] = hub.uploads
        assert hub.branches["me/big"] == {"main": {}, "trial": {}}, "no part of a model is there"
        hub.holds.clear()
        hub.released.set()
        done = geb_ok(*arguments, **hub_environment(hub.url))
        assert f"pushed {hub.url}/me/big/commit/" in done.stdout.replace("\n", "")
        assert hub.branches["me/big"] == {"main": {}, "trial": content_of(folder)}
        assert hub.private == {"me/big": True}
        assert hub.uploads.count(first) == 1, "sent once"
        assert {"README.md", "config.json", "a.safetensors"} <= content_of(folder).keys()


def test_a_push_without_a_token_or_with_a_wrong_one_is_the_user_s_mistake(
    large: Path, tmp_path: Path
) -> None:
    with serve_models(TOKEN) as hub:
        none = geb(*push_arguments(large, tmp_path / "a"), **hub_environment(hub.url, ""))
        assert (none.returncode, (tmp_path / "a").exists()) == (64, False)
        assert "HF_TOKEN is not set" in none.stderr
        wrong = push_arguments(large, tmp_path / "b")
        said = geb_refused(*wrong, **hub_environment(hub.url, "hf_other"))
        assert "the hub refuses a push to me/big" in said
        hub.private["me/big"] = False
        hub.branches["me/big"] = {"main": {}}
        said = geb_refused(*wrong, "--private", **hub_environment(hub.url))
        assert "is there and public, and --private was asked for" in said
        assert hub.branches["me/big"] == {"main": {}}


def test_a_dry_run_lists_the_files_and_neither_copies_nor_sends(
    large: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    done = geb_ok(*push_arguments(large, folder, "--dry-run", "--revision", "trial"), HF_TOKEN="")
    size = len("checkpoint/config.json" + "4" * 64)
    assert f"{size}  config.json" in done.stdout
    assert "4 files of" in done.stdout
    assert "would go to me/big@trial" in " ".join(done.stdout.split())
    assert not folder.exists()
    said = geb_refused("export", "big", folder, "--store", large, "--dry-run")
    assert "--push is not given" in said
