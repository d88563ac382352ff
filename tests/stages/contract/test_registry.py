import json
import multiprocessing
import shutil

import pytest

from stages.contract.errors import DamagedArtifactError, UserError
from stages.contract.request import ArtifactInput
from stages.store.base import Store
from stages.store.registry import ModelRegistry
from tests.stage_calls import checkpoint_artifact


@pytest.fixture
def registry(store):
    return ModelRegistry(store)


def checkpoint(name):
    return ArtifactInput(stage="train", key=f"key-{name}", path="checkpoint", digest=f"d-{name}")


def add(registry, *names, model="tiny"):
    return [registry.register(model, checkpoint(name), metrics={}).version for name in names]


def test_versions_count_up_within_a_name(registry):
    assert add(registry, "a", "b", "c") == [1, 2, 3]
    assert add(registry, "a", model="other") == [1]
    assert registry.names() == ["other", "tiny"]
    assert [version.checkpoint.key for version in registry.versions("tiny")] == [
        "key-a",
        "key-b",
        "key-c",
    ]
    assert len(registry.all_versions()) == 4


def test_checkpoint_is_known_by_its_content(registry):
    first = checkpoint("a")
    same_artifact = first.model_copy(update={"path": "ema", "digest": "d-ema"})
    same_content = first.model_copy(update={"key": "key-b"})
    versions = [
        registry.register("tiny", version, metrics={}).version
        for version in (first, same_artifact, same_content)
    ]
    assert versions == [1, 2, 1]


def test_names_mean_versions(registry):
    add(registry, "a", "b", "c")
    assert registry.find("tiny").version == 3, "none is in production"
    registry.set_alias("tiny", "production", 2)
    meant = {
        spec: registry.find(spec).version
        for spec in ("tiny", "tiny@latest", "tiny@production", "tiny:1", "tiny:3")
    }
    assert meant == {"tiny": 2, "tiny@latest": 3, "tiny@production": 2, "tiny:1": 1, "tiny:3": 3}


def test_a_record_changed_by_hand_is_refused_with_its_mistake(store, registry):
    add(registry, "a")
    registry.set_alias("tiny", "production", 1)
    [path] = (store.root / "models").glob("*.json")
    record = json.loads(path.read_text())
    record["aliases"] = {"production": record["aliases"]["production"], "staging": []}
    record["aliases"]["production"][0]["version"] = 9
    path.write_text(json.dumps(record))
    for name, message in {"tiny": "no version 9", "tiny@staging": "no alias 'staging'"}.items():
        with pytest.raises(UserError, match=message):
            registry.find(name)


def test_mistakes_name_what_there_is(registry):
    add(registry, "a", "b")
    registry.set_alias("tiny", "production", 1)
    cases = [
        (lambda: registry.find("none"), "the registry has no model 'none'", "tiny"),
        (lambda: registry.find("tiny:7"), "no version 7", "1 to 2"),
        (lambda: registry.find("tiny:x"), "names no model", "name:version"),
        (lambda: registry.find("tiny:"), "names no model", "name:version"),
        (lambda: registry.find("tiny:1@latest"), "names no model", "name:version"),
        (lambda: registry.find("tiny@staging"), "no alias 'staging'", "latest, production"),
        (lambda: registry.find("../x"), "is not a model name", "letters"),
        (lambda: registry.set_alias("tiny", "staging", 9), "no version 9", "1 to 2"),
        (lambda: registry.set_alias("tiny", "latest", 1), "not an alias", "latest"),
        (lambda: registry.set_alias("tiny", "../up", 1), "not an alias", "letters"),
        (lambda: add(registry, "c", model=".hidden"), "is not a model name", "letters"),
    ]
    for attempt, message, remedy in cases:
        with pytest.raises(UserError) as caught:
            attempt()
        assert message in caught.value.message
        assert remedy in caught.value.remedy
    assert len(registry.all_versions()) == 2


def _register_many(root, worker, start):
    registry = ModelRegistry(Store.in_folder(root))
    start.wait()
    for number in range(15):
        name = f"{worker}-{number}" if number % 3 else f"shared-{number}"
        version = registry.register("tiny", checkpoint(name), metrics={}).version
        registry.set_alias("tiny", "production", version)


def test_processes_that_register_at_once_lose_nothing(store, registry):
    context = multiprocessing.get_context("spawn")
    start = context.Event()
    workers = [
        context.Process(target=_register_many, args=(str(store.root), worker, start))
        for worker in range(2)
    ]
    for worker in workers:
        worker.start()
    start.set()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    versions = registry.versions("tiny")
    # 10 of each worker's own and 5 that both registered.
    assert [version.version for version in versions] == list(range(1, 26))
    assert len({version.checkpoint.digest for version in versions}) == 25
    alias = registry.aliases("tiny")["production"]
    moves = [move.version for move in alias]
    assert moves[-1] == registry.find("tiny@production").version
    assert set(moves) == set(range(1, 26))


def test_a_model_resolves_until_its_checkpoint_is_damaged_or_gone(store, registry):
    trained = checkpoint_artifact(store, "weights")
    registry.register("tiny", trained.ref("checkpoint"), metrics={}, run="nightly")
    version, artifact = registry.resolve("tiny@latest")
    assert artifact.file(f"{version.checkpoint.path}/model.safetensors").read_text() == "weights"
    (trained.path / "checkpoint/model.safetensors").write_text("altered")
    with pytest.raises(DamagedArtifactError, match="has changed"):
        registry.resolve("tiny")
    shutil.rmtree(trained.path)
    with pytest.raises(UserError, match="tiny:1 is no longer in the store") as caught:
        registry.resolve("tiny")
    assert "resume the run 'nightly'" in caught.value.remedy
