import os
import re
import shutil
from pathlib import Path

import pytest

from stages.contract.errors import DamagedArtifactError, StoreError
from stages.harness.program import Stage
from stages.store.base import Store
from tests.damage import alter, truncate
from tests.stage_calls import EventLog
from tests.stages.contract.writer_stage import FILES, WriterParams, compute, request, write_files


def counting():
    calls = []

    def run(ctx):
        calls.append(1)
        write_files(ctx)

    return Stage(WriterParams, run), calls


@pytest.mark.parametrize("name", [*FILES, "timings.json", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, alter, Path.unlink])
def test_damage_of_any_file_is_noticed_and_repaired(store, name, damage):
    stage, calls = counting()
    whole = compute(store, stage)
    digest = whole.manifest.digest()
    damage(whole.path / name)
    if name == "manifest.json" and damage is alter:
        (whole.path / name).write_text("[]")
    with pytest.raises(DamagedArtifactError, match="damaged artifact"):
        store.load("writer", whole.manifest.key)
    events = EventLog()
    again = compute(store, stage, events=events)
    assert len(calls) == 2
    assert again.manifest.digest() == digest
    warnings = [e.message for e in events.events if e.type == "log" and e.level == "warning"]
    assert len(warnings) == 1
    assert "damaged artifact" in warnings[0]
    assert "Set aside in" in warnings[0]
    [aside] = (store.root / "quarantine").iterdir()
    assert str(aside) in warnings[0]
    assert re.fullmatch(rf"writer-{whole.manifest.key[:16]}-\d{{8}}-\d{{6}}-\w{{6}}", aside.name)
    assert store.load("writer", whole.manifest.key) is not None


def test_a_change_that_hides_its_time_is_found_by_verify(store):
    artifact = compute(store)
    path = artifact.path / FILES[0]
    before = path.stat()
    alter(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.load("writer", artifact.manifest.key) is not None
    with pytest.raises(DamagedArtifactError, match=FILES[0]):
        store.verify(artifact)


@pytest.mark.parametrize("content", [b"\xff{}", b"{", b"[1]", b"[" * 100_000, b""])
def test_a_broken_record_is_damage_with_its_place_and_remedy(store, content):
    artifact = compute(store)
    (artifact.path / "metrics.json").write_bytes(content)
    with pytest.raises(DamagedArtifactError) as caught:
        artifact.read_json("metrics.json")
    assert str(artifact.path / "metrics.json") in str(caught.value)
    assert f"delete the folder {artifact.path}, and" in str(caught.value)


def test_a_file_that_no_manifest_lists_is_found_by_verify(store):
    """A checkpoint's loader would read it."""
    artifact = compute(store)
    (artifact.path / "checkpoint/adapter_config.json").write_text("{}")
    with pytest.raises(DamagedArtifactError, match=r"checkpoint/adapter_config\.json"):
        store.verify(artifact)


def test_a_hit_computes_nothing(store):
    stage, calls = counting()
    first, second = compute(store, stage), compute(store, stage)
    assert len(calls) == 1
    assert first.manifest == second.manifest
    assert compute(store, stage, text="other").manifest.key != first.manifest.key
    assert len(calls) == 2


def test_work_survives_a_failed_attempt_and_goes_with_the_artifact(store):
    def run(ctx):
        kept = ctx.work / "chunk"
        if not kept.exists():
            kept.write_text("half done")
            raise RuntimeError("boom")
        (ctx.out / "result").write_text(kept.read_text())

    stage = Stage(WriterParams, run)
    with pytest.raises(RuntimeError, match="boom"):
        compute(store, stage)
    artifact = compute(store, stage)
    assert (artifact.path / "result").read_text() == "half done"
    assert not store.work_path("writer", artifact.manifest.key).exists()


def test_what_a_killed_attempt_left_is_swept_by_key_and_never_seen(store):
    key = request(store).key
    stale, other = (store.new_scratch("writer", of) for of in (key, "a" * 64))
    (stale / "half").write_text("half")
    assert store.load("writer", key) is None
    assert list(store.artifacts()) == []
    compute(store)
    assert {path.name for path in (store.root / "artifacts/writer").iterdir()} == {key, other.name}


def test_the_artifact_that_came_first_stays(store):
    first = compute(store)
    scratch = store.new_scratch("writer", first.manifest.key)
    (scratch / "metrics.json").write_text("another")
    second = store.publish(scratch, first.manifest.model_copy(update={"run": "late"}))
    assert second.manifest == first.manifest
    assert not scratch.exists()
    store.verify(second)


def test_all_of_an_artifact_is_on_disk_before_it_has_its_name(store, monkeypatch):
    """After a loss of power there would else be an artifact of empty files."""
    fsync, rename = os.fsync, os.rename
    synced = set()
    published = []

    def noted(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def checked(source, target):
        if Path(source).name.startswith(".scratch-"):
            paths = [source, *source.rglob("*")]
            assert [path for path in paths if path.stat().st_ino not in synced] == []
            published.append(target)
            synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", checked)
    artifact = compute(store)
    assert published == [artifact.path]
    assert artifact.path.parent.stat().st_ino in synced, "nor is the name there"


def test_checkpoints_can_be_read_by_other_users(store):
    def run(ctx):
        (ctx.out / "checkpoint").mkdir(mode=0o700)
        (ctx.out / "checkpoint/model.safetensors").touch(mode=0o600)

    artifact = compute(store, Stage(WriterParams, run))
    assert (artifact.path / "checkpoint").stat().st_mode & 0o777 == 0o755
    assert (artifact.path / "checkpoint/model.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_store_that_is_gone_is_a_failure_and_no_miss(store, tmp_path):
    artifact = compute(store)
    store.root.rename(tmp_path / "unmounted")
    with pytest.raises(StoreError, match="is gone"):
        store.load("writer", artifact.manifest.key)
    with pytest.raises(StoreError, match="file system mounted"):
        Store.in_folder(str(store.root))
    with pytest.raises(StoreError):
        compute(store)
    assert not store.root.exists()


def test_a_store_made_anew_at_the_same_path_is_another_one(tmp_path):
    first = Store.in_folder(str(tmp_path / "store"), create=True).identity
    shutil.rmtree(tmp_path / "store")
    assert Store.in_folder(str(tmp_path / "store"), create=True).identity != first
    assert Store.in_folder(str(tmp_path / "store")).identity == Store(tmp_path / "store").identity
