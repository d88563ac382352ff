"""One computation among hosts that share a bucket: who computes, and from where it goes on."""

import json
import os
from unittest.mock import Mock

import pytest

from stages.store.registry import ModelRegistry
from stages.store.remote.sync import signs_of_life, signs_passed_on
from tests.flows.runners.bucket_sync.hosts import Host, write
from tests.object_storage import host, objects


def test_two_hosts_at_one_key_share_the_first_artifact(near, far):
    inner = []

    def slow(context):
        write(context)
        if not inner:
            # The other host makes the same meanwhile, and is the first to upload it.
            inner.append(far.make())
            os.environ["GEB_CACHE"] = str(near.store.root.parent)

    near.body = slow
    artifact = near.make()
    assert (len(near.requests), len(far.requests)) == (1, 1)
    assert artifact.manifest == inner[0].manifest == far.make().manifest
    near.store.verify(artifact)
    assert artifact.file("large.txt").read_text() == "made" * 1000


def test_only_signs_of_its_own_orchestrator_keep_a_stage_alive(near, far, tmp_path):
    near.make()
    [request] = near.requests
    with signs_of_life(near.store, request):
        for name, host in (("near", near), ("far", far)):
            owner = host.store.folder_id
            # What passes signs on looks once more at the end of its block.
            with signs_passed_on(far.store, request, owner, tmp_path / name):
                pass
    sign = f"orchestrators/{request.stage}/{request.key}"
    assert (tmp_path / "near" / sign).exists()
    assert not (tmp_path / "far" / sign).exists()


def test_another_host_goes_on_from_where_an_attempt_ended(near, far):
    def fail(context):
        (context.work / "chunks").mkdir()
        (context.work / "chunks/1").write_text("first half")
        (context.work / "chunks/same").write_text("first half")
        (context.work / "chunks/.2").write_text("sec")
        raise RuntimeError("the host burns")

    def go_on(context):
        assert (context.work / "chunks/same").read_text() == "first half"
        assert not (context.work / "chunks/.2").exists(), "half written"
        done = (context.work / "chunks/1").read_text()
        (context.out / "whole").write_text(done + ", second half")

    near.body, far.body = fail, go_on
    with pytest.raises(RuntimeError):
        near.make()
    artifact = far.make()
    assert artifact.file("whole").read_text() == "first half, second half"
    assert "attempt on another host" in far.said()
    assert not any(name.startswith("work/") for name in objects(near.store.location))


def test_a_host_goes_on_from_a_later_attempt_of_another_host(near, far):
    def fail(context):
        steps = context.work / "steps"
        steps.write_text(f"{steps.read_text() if steps.exists() else ''}1")
        raise RuntimeError

    def go_on(context):
        (context.out / "whole").write_text((context.work / "steps").read_text())

    near.body = far.body = fail
    for one in (near, far):
        with pytest.raises(RuntimeError):
            one.make()
    near.body = go_on
    assert near.make().file("whole").read_text() == "11"


def test_hosts_share_state_and_models_in_azure(az_url, tmp_path):
    def fail(context):
        (context.work / "step").write_text("half")
        raise RuntimeError

    def go_on(context):
        (context.out / "whole").write_text((context.work / "step").read_text())

    near = Host(host(az_url, tmp_path / "near", create=True), fail)
    far = Host(host(az_url, tmp_path / "far"), go_on)
    with pytest.raises(RuntimeError):
        near.make()
    artifact = far.make()
    assert near.make().file("whole").read_text() == "half"
    for number, text in enumerate(("one", "two"), 1):
        checkpoint = artifact.ref().model_copy(update={"digest": text})
        ModelRegistry(near.store).register("tiny", checkpoint, metrics={})
        ModelRegistry(far.store).set_alias("tiny", "production", number)
    history = ModelRegistry(near.store).aliases("tiny")["production"]
    assert [move.version for move in history] == [1, 2]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_running_stage_is_saved_now_and_then(near, far, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))

    def long(context):
        (context.work / "step-1").write_text("1")
        while not (snapshots := _snapshots(near.store)) or "step-1" not in snapshots[0]["files"]:
            pass
        (context.work / "step-2").write_text("2")
        (context.work / "step-1").unlink()
        while not (snapshots := _snapshots(near.store)) or set(snapshots[0]["files"]) != {"step-2"}:
            pass
        # The host is gone at once: what comes after the last snapshot is lost.
        near.store.bucket.put = None
        raise RuntimeError

    def go_on(context):
        assert [path.name for path in context.work.iterdir()] == ["step-2"]
        write(context)

    near = Host(near.store, long, sync_seconds=0.01)
    with pytest.raises(RuntimeError):
        near.make()
    far.body = go_on
    far.make()
    assert len(far.requests) == 1


def _snapshots(store):
    names = objects(store.location)
    return [json.loads(data) for name, data in names.items() if name.endswith("snapshot.json")]
