"""Registry, run views and garbage collection of hosts that share a bucket."""

import os

import pytest

from flows.commands.store import collect_garbage, remove_garbage
from flows.execution.run_record import RunRecord, runs
from flows.pipeline.config import RunConfig
from stages.contract.errors import ConflictError, UserError
from stages.contract.request import ArtifactInput
from stages.store.registry import ModelRegistry
from stages.store.remote.bucket import Bucket
from stages.store.remote.store import RemoteStore
from tests.flows.records import recorded
from tests.object_storage import host, objects


def test_a_record_that_another_host_changed_is_not_overwritten(here, there):
    checkpoint = ArtifactInput(stage="train", key="one", path="checkpoint", digest="one")
    ModelRegistry(here).register("tiny", checkpoint, metrics={})
    model = "models/tiny.json"

    def move_behind_the_back():
        with here.exclusive("models"):
            here.bucket.put(model, b'{"moved": "by somebody without a lease"}')
            path = here.root / model
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")

    with pytest.raises(ConflictError, match="changed meanwhile"):
        move_behind_the_back()
    assert objects(here.location)[model] == b'{"moved": "by somebody without a lease"}'
    assert not (here.root / model).exists(), "no other host has it"


@pytest.mark.parametrize("storage", ["url", "az_url"])
def test_a_record_is_fetched_once_and_not_by_its_writer(request, tmp_path, monkeypatch, storage):
    url = request.getfixturevalue(storage)
    near = host(url, tmp_path / "near", create=True)
    far = host(url, tmp_path / "far")
    near.write(near.root / "runs/nightly/config.json", "{}")
    get = Bucket.get
    fetched = []
    monkeypatch.setattr(
        Bucket, "get", lambda bucket, name: fetched.append(name) or get(bucket, name)
    )
    for store in (near, far, far):
        store.refresh("runs")
    assert fetched == ["runs/nightly/config.json"]
    assert (far.root / "runs/nightly/config.json").read_text() == "{}"
    copy = far.root / "runs/nightly/config.json"
    near.write(near.root / "runs/nightly/config.json", "[]")
    far.refresh("runs")
    assert copy.read_text() == "[]"
    time = copy.stat().st_mtime_ns
    # The same content again, at a later time, is another start of the run.
    os.utime(copy, ns=(time - 3600 * 10**9,) * 2)
    far.refresh("runs")
    assert copy.stat().st_mtime_ns == time
    assert fetched == ["runs/nightly/config.json"] * 2


def test_a_run_is_seen_on_every_host(here, there):
    view = RunRecord(here, "nightly")
    view.save_config(RunConfig(name="nightly", seed=1))
    recorded(view, "iteration-1/train", state="running")
    far = RunRecord.existing(there, "nightly")
    assert far.config().seed == 1
    assert [step.state for step in far.steps()] == ["running"]
    recorded(view, "iteration-1/train", state="failed")
    view.save_config(RunConfig(name="nightly", seed=2))
    far = RunRecord.existing(there, "nightly")
    assert far.config().seed == 2
    assert [step.state for step in far.steps()] == ["failed"]
    assert runs(there) == ["nightly"]
    with pytest.raises(UserError, match="no run 'other' in s3://"):
        RunRecord.existing(there, "other")


def test_a_log_is_shared(here):
    log = here.local.log_path("make", "key") / "1.log"
    log.parent.mkdir(parents=True)
    log.write_text("said")
    assert here.share(log) == f"{here.location}/logs/make/key/1.log"
    assert objects(here.location)["logs/make/key/1.log"] == b"said"


def test_leftovers_in_the_bucket_are_found_and_removed(here, monkeypatch):
    bucket = here.bucket
    bucket.put("artifacts/make/abandoned/1234/weights", b"12345")
    for key in ("forgotten", "wanted", "busy"):
        bucket.put(f"work/make/{key}/host/snapshot.json", b"{}")
    bucket.put("quarantine/make-old/manifest.json", b"unreadable")
    view = RunRecord(here, "nightly")
    view.save_config(RunConfig(name="nightly"))
    recorded(view, "make", stage="make", key="wanted", state="failed")
    with here.lease("make", "busy") as lease:
        lease.acquire()
        # Another host may be at work on what is young.
        assert [item.entry.kind for item in collect_garbage(here)] == ["aside"]
        monkeypatch.setattr(RemoteStore, "left_seconds", -60.0)
        garbage = collect_garbage(here)
        assert {item.entry.place: item.entry.bytes for item in garbage} == {
            "artifacts/make/abandoned": 5,
            "work/make/forgotten": 2,
            "quarantine/make-old": 10,
        }
        remove_garbage(here, garbage)
        assert collect_garbage(here) == []
    left = {name.split("/")[2] for name in objects(here.location) if name.startswith("work/")}
    assert left == {"wanted", "busy"}
