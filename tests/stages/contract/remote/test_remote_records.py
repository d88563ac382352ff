"""Registry, run views and garbage collection of hosts that share a bucket."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flows.commands.gc import collect, remove
from flows.execution.run_record import RunRecord, StepRecord, runs
from flows.pipeline.config import RunConfig
from stages.contract.errors import UserError
from stages.contract.registry import ModelRegistry
from stages.contract.remote import external_inputs, transfer
from stages.contract.remote.bucket import Bucket, Version
from stages.contract.remote.errors import ConflictError
from stages.contract.remote.store import RemoteStore
from stages.contract.request import ArtifactInput
from tests.object_storage import host, objects
from tests.stage_calls import file_input


def checkpoint(name: str) -> ArtifactInput:
    return ArtifactInput(stage="train", key=name, path="checkpoint", digest=name)


def test_models_registered_on_one_host_are_seen_on_the_other(here, there):
    ModelRegistry(here).register("tiny", checkpoint("one"), metrics={"win_rate": 0.5})
    ModelRegistry(here).set_alias("tiny", "production", 1)
    registry = ModelRegistry(there)
    registry.register("tiny", checkpoint("two"), metrics={})
    registry.set_alias("tiny", "production", 2)
    found = ModelRegistry(here)
    assert [each.version for each in found.versions("tiny")] == [1, 2]
    assert found.find("tiny@production").checkpoint == checkpoint("two")
    assert found.rollback("tiny", "production").version == 1
    assert ModelRegistry(there).alias("tiny", "production").version == 1
    with pytest.raises(UserError, match="nothing to go back to"):
        ModelRegistry(there).rollback("tiny", "production")


def test_two_hosts_that_register_at_once_get_a_version_each(here: RemoteStore, there: RemoteStore):
    def register(store: RemoteStore, names: list[str]) -> None:
        for name in names:
            ModelRegistry(store).register("tiny", checkpoint(name), metrics={})

    threads = [
        threading.Thread(target=register, args=(here, ["a", "b"])),
        threading.Thread(target=register, args=(there, ["c", "d"])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    versions = ModelRegistry(here).versions("tiny")
    assert [each.version for each in versions] == [1, 2, 3, 4]
    assert {each.checkpoint.key for each in versions} == {"a", "b", "c", "d"}


def test_a_record_that_another_host_changed_meanwhile_is_not_overwritten(here, there):
    ModelRegistry(here).register("tiny", checkpoint("one"), metrics={})
    alias = "models/tiny/aliases/production.json"

    def move_behind_the_back() -> None:
        with here.exclusive("models"):
            here.bucket.put(alias, b'{"moved": "by somebody without a lease"}')
            path = here.root / alias
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")

    with pytest.raises(ConflictError, match="changed meanwhile"):
        move_behind_the_back()
    assert objects(here.location)[alias] == b'{"moved": "by somebody without a lease"}'


def test_a_look_at_the_registry_does_not_undo_a_move_that_is_under_way(here, there, tmp_path):
    registry = ModelRegistry(here)
    for key in ("one", "two"):
        registry.register("tiny", checkpoint(key), metrics={})
    registry.set_alias("tiny", "production", 1)
    alias = "models/tiny/aliases/production.json"
    with here.exclusive("models"):
        moved = (here.root / alias).read_text().replace('"version": 1', '"version": 2')
        (here.root / alias).write_text(moved)
        # Another run on this host draws its table, say.
        ModelRegistry(host(here.location, tmp_path / "here"))
    assert ModelRegistry(there).alias("tiny", "production").version == 2


def test_records_of_a_failed_change_do_not_stay(here: RemoteStore):
    def fail() -> None:
        with here.exclusive("models"):
            path = here.root / "models/tiny/versions/1.json"
            path.parent.mkdir(parents=True)
            path.write_text("{}")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    ModelRegistry(here).register("other", checkpoint("one"), metrics={})
    assert ModelRegistry(here).names() == ["other"]


def record(step: str, state: str, key: str = "k") -> StepRecord:
    return StepRecord.model_validate(
        {"step": step, "stage": "make", "key": key, "key_fields": {}, "state": state, "started": 0}
    )


def test_a_run_is_seen_on_every_host(here: RemoteStore, there: RemoteStore):
    view = RunRecord(here, "nightly")
    view.save_config(RunConfig(name="nightly", seed=1))
    view.save_step(record("iteration-1/train", "running"))
    far = RunRecord.existing(there, "nightly")
    assert far.config().seed == 1
    assert [each.state for each in far.steps()] == ["running"]
    view.save_step(record("iteration-1/train", "failed"))
    view.save_config(RunConfig(name="nightly", seed=2))
    far = RunRecord.existing(there, "nightly")
    assert far.config().seed == 2
    assert [each.state for each in far.steps()] == ["failed"]
    assert runs(there) == ["nightly"]
    with pytest.raises(UserError, match="no run 'other' in s3://"):
        RunRecord.existing(there, "other")


def test_what_did_not_change_does_not_travel_again(here: RemoteStore, there: RemoteStore):
    RunRecord(here, "nightly").save_config(RunConfig(name="nightly"))
    fetched: list[str] = []
    get_all = there.bucket.get_all

    def counted(names: object) -> object:
        fetched.extend(names := list(names))
        return get_all(names)

    there.bucket.get_all = counted
    for _ in range(2):
        RunRecord.existing(there, "nightly")
    assert fetched == ["runs/nightly/config.json"]


def test_a_record_that_changes_while_it_travels_is_shared_the_next_time(here, there, monkeypatch):
    path = here.run_path("one") / "steps" / "train.json"
    path.parent.mkdir(parents=True)
    path.write_text("running")
    put = Bucket.put

    def changed_meanwhile(bucket: Bucket, name: str, data: bytes, **rest: Any) -> Version:
        path.write_text("done")
        return put(bucket, name, data, **rest)

    monkeypatch.setattr(Bucket, "put", changed_meanwhile)
    here.share(path)
    monkeypatch.setattr(Bucket, "put", put)
    here.share(path)
    there.refresh("runs/one")
    assert (there.run_path("one") / "steps" / "train.json").read_text() == "done"


def test_two_stages_that_want_one_input_download_it_once(here, there, tmp_path, monkeypatch):
    """Both would write into the same unfinished file."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    wanted = file_input(source)
    here.external_inputs.upload(wanted)
    both, downloads = threading.Barrier(2), []
    download_files = external_inputs.download_files

    def meets_the_other(*arguments: Any) -> None:
        # Only where nothing keeps the two apart.
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        downloads.append(arguments)
        download_files(*arguments)

    monkeypatch.setattr(external_inputs, "download_files", meets_the_other)
    with ThreadPoolExecutor(2) as pool:
        places = list(pool.map(there.external_inputs.download, [wanted, wanted]))
    assert len(downloads) == 1
    assert [(each / "config.json").read_text() for each in places] == ["{}", "{}"]


def test_files_of_a_folder_come_at_the_same_time(here, there, tmp_path, monkeypatch):
    """A checkpoint in many shards, two of them equal, which would be one unfinished file."""
    source = tmp_path / "model"
    source.mkdir()
    contents = {"one": "1", "two": "2", "again": "2", "sub/three": "3"}
    for name, text in contents.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    wanted = file_input(source)
    here.external_inputs.upload(wanted)
    together = threading.Barrier(3)
    read_range = Bucket.read_range
    known: list[str] = []

    def meets_the_others(bucket: Bucket, name: str, start: int, stop: int) -> bytes:
        # The second of the equal files comes when the others are here.
        if name not in known:
            known.append(name)
            together.wait(120)
        return read_range(bucket, name, start, stop)

    monkeypatch.setattr(Bucket, "read_range", meets_the_others)
    place = there.external_inputs.download(wanted)
    assert place is not None
    assert {name: (place / name).read_text() for name in contents} == contents
    assert len(known) == 3


def test_a_download_is_on_the_disk_before_it_has_its_name(here, there, tmp_path, monkeypatch):
    """After a loss of power its size and time would be right, and it would not be hashed again."""
    source = tmp_path / "prompts.jsonl"
    source.write_text("one")
    here.external_inputs.upload(file_input(source))
    synced: list[str] = []

    def sync(path: Path) -> None:
        synced.append(path.read_text())

    monkeypatch.setattr(transfer, "fsync", sync)
    there.external_inputs.download(file_input(source))
    assert synced == ["one"]


def test_logs_and_reports_are_shared(here: RemoteStore):
    folder = here.local.log_path("make", "key")
    folder.mkdir(parents=True)
    (folder / "1.log").write_text("said")
    assert here.share(folder) == f"{here.location}/logs/make/key"
    assert objects(here.location)["logs/make/key/1.log"] == b"said"


def test_leftovers_in_the_bucket_are_found_and_removed(here: RemoteStore, tmp_path: Path):
    bucket = here.bucket
    bucket.put("artifacts/make/abandoned/1234/weights", b"12345")
    bucket.put("work/make/forgotten/snapshot.json", b"{}")
    bucket.put("work/make/wanted/snapshot.json", b"{}")
    bucket.put("work/make/busy/snapshot.json", b"{}")
    bucket.put("quarantine/make-old.json", b"unreadable")
    view = RunRecord(here, "nightly")
    view.save_config(RunConfig(name="nightly"))
    view.save_step(record("make", "failed", "wanted"))
    with here.lease("make", "busy") as lease:
        lease.acquire()
        garbage = collect(here)
        assert {each.held.place: each.held.bytes for each in garbage} == {
            "artifacts/make/abandoned/1234": 5,
            "work/make/forgotten": 2,
            "quarantine/make-old.json": 0,
        }
        remove(here, garbage)
        assert collect(here) == []
    assert {"work/make/wanted/snapshot.json", "work/make/busy/snapshot.json"} <= set(
        objects(here.location)
    )
