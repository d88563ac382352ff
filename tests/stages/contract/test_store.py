from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from stages.contract.errors import (
    EXIT_USER,
    DamagedArtifactError,
    StoreError,
    UserError,
)
from stages.contract.events import Emitter
from stages.contract.local_store import LocalStore
from stages.contract.params import StageParams
from stages.contract.program import Stage, execute
from stages.contract.request import Request, make_request
from stages.contract.signature import InputSpec
from stages.contract.store import Artifact
from stages.contract.tables import PROMPTS, write_table
from tests.stage_calls import EventLog, file_input


class WriterParams(StageParams):
    """A stage for these tests: writes a few files."""

    stage: ClassVar[str] = "writer"
    version: ClassVar[str] = "1"

    text: str = "content"


FILES = ("metrics.json", "rows.jsonl", "checkpoint/config.json", "checkpoint/model.safetensors")


def write_files(ctx) -> None:
    (ctx.out / "checkpoint").mkdir()
    for name in FILES:
        (ctx.out / name).write_text(f"{name}: {ctx.params.text}\n")
    ctx.telemetry_path("timings.json").write_text("{}")


WRITER = Stage(WriterParams, write_files)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(str(tmp_path / "store"), create=True)


def request(store: LocalStore, text: str = "content") -> Request:
    return make_request(WriterParams(text=text), inputs={}, seed=0, store=str(store.root))


def compute(
    store: LocalStore, stage: Stage = WRITER, text: str = "content", events=None
) -> Artifact:
    return execute(stage, request(store, text), events or Emitter(io.StringIO()))


def counting() -> tuple[Stage, list[int]]:
    calls: list[int] = []

    def run(ctx) -> None:
        calls.append(1)
        write_files(ctx)

    return Stage(WriterParams, run), calls


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def alter(path: Path) -> None:
    """Another byte, the same size and the same modification time as another file would have."""
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "altered": alter,
    "removed": remove,
}


@pytest.mark.parametrize("name", [*FILES, "timings.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_file_is_noticed_and_repaired(store, name, damage):
    stage, calls = counting()
    whole = compute(store, stage)
    digest = whole.manifest.digest()
    DAMAGES[damage](whole.path / name)
    if name == "manifest.json" and damage == "altered":
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


def test_what_is_damaged_again_is_set_aside_again_and_artifacts_are_listed_by_stage(store):
    stage, _ = counting()
    for _ in range(2):
        truncate(compute(store, stage).path / FILES[0])
    again = compute(store, stage)
    assert len(list((store.root / "quarantine").iterdir())) == 2
    assert list(store.artifacts()) == list(store.artifacts("writer"))
    assert list(store.artifacts()) == [("writer", again.manifest.key)]
    assert list(store.artifacts("train")) == []


def test_a_change_that_hides_its_time_is_found_by_verify(store):
    artifact = compute(store)
    path = artifact.path / FILES[0]
    before = path.stat()
    alter(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.load("writer", artifact.manifest.key) is not None
    with pytest.raises(DamagedArtifactError, match=FILES[0]):
        store.verify(artifact)


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


def test_a_copied_artifact_whose_times_changed_is_still_a_hit(store, tmp_path):
    artifact = compute(store)
    copy = tmp_path / "copy"
    shutil.copytree(store.root, copy, copy_function=shutil.copyfile)
    found = LocalStore.open(str(copy)).load("writer", artifact.manifest.key)
    assert found is not None
    assert found.manifest == artifact.manifest


def test_digests_name_content_and_leave_telemetry_out(store, tmp_path):
    artifact = compute(store)
    manifest = artifact.manifest
    assert set(manifest.files) == {*FILES, "timings.json"}
    assert manifest.files["rows.jsonl"].rows == 1
    changed = manifest.model_copy(
        update={"files": {name: r for name, r in manifest.files.items() if name != "timings.json"}}
    )
    assert changed.digest() == manifest.digest()
    assert len({manifest.digest(), manifest.digest("checkpoint"), manifest.digest(FILES[0])}) == 3
    with pytest.raises(KeyError, match="nothing"):
        manifest.digest("nothing")


def test_a_stage_that_fails_leaves_no_artifact_and_no_scratch(store):
    def run(ctx) -> None:
        write_files(ctx)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        compute(store, Stage(WriterParams, run))
    assert list(store.artifacts()) == []
    assert list((store.root / "artifacts/writer").iterdir()) == []


def test_work_survives_a_failed_attempt_and_goes_with_the_artifact(store):
    def run(ctx) -> None:
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


def test_what_a_killed_attempt_left_is_swept_and_never_seen(store):
    key = request(store).key
    stale = store.new_scratch("writer", key)
    (stale / "half").write_text("half")
    assert store.load("writer", key) is None
    assert list(store.artifacts()) == []
    compute(store)
    assert [path.name for path in (store.root / "artifacts/writer").iterdir()] == [key]


def test_the_artifact_that_came_first_stays(store):
    first = compute(store)
    scratch = store.new_scratch("writer", first.manifest.key)
    (scratch / "metrics.json").write_text("another")
    second = store.publish(scratch, first.manifest.model_copy(update={"run": "late"}))
    assert second.manifest == first.manifest
    assert not scratch.exists()
    store.verify(second)


def test_checkpoints_can_be_read_by_other_users(store):
    def run(ctx) -> None:
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
        LocalStore.open(str(store.root))
    with pytest.raises(StoreError):
        compute(store)
    assert not store.root.exists()


def test_what_is_no_store_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    newer = LocalStore.open(str(tmp_path / "newer"), create=True)
    (newer.root / "store.json").write_text(json.dumps({"format": 99}))
    cases = [
        ("s3://bucket/store", "is a URL"),
        (str(tmp_path / "full"), "is not a store"),
        (str(newer.root), "store of format 99"),
    ]
    for location, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            LocalStore.open(location, create=True)
        assert caught.value.remedy


def fills_disk_with_bytes(ctx) -> None:
    # The kernel's own "no space left", without filling a disk.
    (ctx.out / "big").symlink_to("/dev/full")
    (ctx.out / "big").write_bytes(bytes(100))


def fills_disk_with_a_table(ctx) -> None:
    (ctx.out / "big.parquet").symlink_to("/dev/full")
    write_table(ctx.out / "big.parquet", PROMPTS, [])


def fills_disk_with_weights(ctx) -> None:
    # As safetensors says it: an error of its own, which is no OSError.
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    "run", [fills_disk_with_bytes, fills_disk_with_a_table, fills_disk_with_weights]
)
def test_a_full_disk_is_one_clear_message(store, run):
    with pytest.raises(UserError, match="no space left") as caught:
        compute(store, Stage(WriterParams, run))
    assert str(store.root) in caught.value.message
    assert "geb gc" in caught.value.remedy
    assert list(store.artifacts()) == []
    assert list((store.root / "artifacts/writer").iterdir()) == []


def test_a_crash_beside_a_full_disk_keeps_its_own_words(store, monkeypatch):
    def crash(ctx) -> None:
        raise RuntimeError("unexpected pos 64 vs 0")

    def refuse(ctx) -> None:
        raise UserError("bad value 7")

    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=0))
    with pytest.raises(UserError, match="unexpected pos 64 vs 0; the likely cause: no space left"):
        compute(store, Stage(WriterParams, crash))
    with pytest.raises(UserError) as caught:
        compute(store, Stage(WriterParams, refuse))
    assert caught.value.message == "bad value 7"


def test_a_store_that_cannot_be_written_is_a_users_mistake(store):
    def run(ctx) -> None:
        raise PermissionError(13, "Permission denied", str(ctx.out / "x"))

    with pytest.raises(UserError, match="cannot be written: Permission denied"):
        compute(store, Stage(WriterParams, run))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": "other"}, "the request is for stage 'other'"),
        ({"version": "0"}, "wants writer version 0, this program is version 1"),
        ({"params": {"txt": "x"}}, "wrong parameters for writer"),
        ({"seed": 5}, "is not the key of its content"),
    ],
)
def test_a_request_that_is_not_this_stages_is_refused(store, change, message):
    wrong = request(store).model_copy(update=change)
    with pytest.raises(UserError, match=message):
        execute(WRITER, wrong, Emitter(io.StringIO()))
    assert list(store.artifacts()) == []


def test_the_program_refuses_what_is_no_request(tmp_path):
    path = tmp_path / "request.json"
    path.write_text('{"stage": "pair"}')
    for argument in (str(path), str(tmp_path / "missing.json")):
        ended = subprocess.run(
            [sys.executable, "-m", "stages.pair", argument],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == EXIT_USER
        assert json.loads(ended.stdout)["kind"] == "user"
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("dear"),
        os.mkfifo,
        lambda path: path.symlink_to("/dev/null"),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/nowhere/at/all"),
    ],
    ids=["file", "pipe", "device", "loop", "dangling"],
)
def test_no_store_is_made_where_something_else_is(tmp_path, make):
    path = tmp_path / "place"
    make(path)
    with pytest.raises(UserError, match=f"{path} is no folder"):
        LocalStore.open(str(path), create=True)


def test_damage_that_another_process_has_set_aside_first_is_no_failure(store, monkeypatch):
    whole = compute(store)
    truncate(whole.path / FILES[0])
    load = store.load

    def slower(stage: str, key: str) -> Artifact | None:
        try:
            return load(stage, key)
        finally:
            LocalStore.open(str(store.root)).set_aside(stage, key)

    monkeypatch.setattr(store, "load", slower)
    assert store.find("writer", whole.manifest.key, warn=pytest.fail) is None


class ReaderParams(StageParams):
    """A stage that reads one external input."""

    stage: ClassVar[str] = "reader"
    version: ClassVar[str] = "1"
    inputs: ClassVar = {"code": InputSpec("file")}


@pytest.mark.parametrize("edited", ["oracle.py", "model/config.json"])
def test_an_input_edited_after_the_request_was_made_is_refused(store, tmp_path, edited):
    """Else what was made of the edited file would be the artifact of the one before, for good."""
    (tmp_path / "model").mkdir()
    (tmp_path / edited).write_text("one\n")
    place = tmp_path / edited.partition("/")[0]
    asked = make_request(
        ReaderParams(), inputs={"code": [file_input(place)]}, seed=0, store=str(store.root)
    )
    (tmp_path / edited).write_text("two\n")
    stage = Stage(ReaderParams, lambda ctx: None)
    with pytest.raises(UserError, match=re.escape(f"'code': {place} has changed since")):
        execute(stage, asked, Emitter(io.StringIO()))
    (tmp_path / edited).write_text("one\n")
    execute(stage, asked, Emitter(io.StringIO()))
