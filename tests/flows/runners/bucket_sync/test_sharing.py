"""Transfers between hosts that share a bucket, and the view of each of them."""

import pytest

from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from stages.contract.errors import StoppedError, StoreError
from stages.store.opening import open_store
from stages.store.registry import ModelRegistry
from tests.at_work import said
from tests.flows.runners.bucket_sync.hosts import Host, local_files, write
from tests.object_storage import SECRET, Gate, host, objects
from tests.probe_stage import probe_request


def test_a_hit_on_another_host_brings_files_on_demand(near, far):
    artifact = near.make()
    fetched = far.make()
    assert far.requests == []
    assert fetched.manifest == artifact.manifest
    assert local_files(far.store) == set()
    assert fetched.file("checkpoint/weights").read_text() == "made weights"
    assert local_files(far.store) == {"manifest.json", "weights"}


def test_a_stage_gets_the_inputs_that_it_names_and_a_local_folder(near, far):
    artifact = near.make()

    def read(context):
        names = sorted(path.name for path in context.path("parts").iterdir())
        (context.out / "names").write_text(" ".join(names))

    far.body = read
    result = far.make("read", artifact.ref("checkpoint"))
    assert result.file("names").read_text() == "tokens weights"
    assert "large.txt" not in local_files(far.store)
    [request] = far.requests
    assert request.store == str(far.store.root)
    assert near.store.load("make", request.key).file("names").read_text() == "tokens weights"


def test_no_secret_and_no_place_of_the_bucket_is_in_what_is_kept(near, far):
    artifact = near.make()
    far.make("read", artifact.ref())
    kept = list(objects(near.store.location).values())
    kept += [path.read_bytes() for path in far.store.root.rglob("*") if path.is_file()]
    assert len(kept) > 8
    assert not any(SECRET.encode() in data for data in kept)
    requests = "".join(request.model_dump_json() for request in far.requests)
    assert far.store.location not in requests


def test_a_push_is_visible_only_when_whole_and_can_be_continued(near, far, s3, monkeypatch):
    gate = Gate(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
    reached = Host(host(near.store.location, near.store.root.parent), write)
    upload = type(reached.store.bucket).upload
    uploaded = []

    def break_after_two(bucket, path, name):
        if len(uploaded) == 2:
            gate.close()
        upload(bucket, path, name)
        uploaded.append(name)

    monkeypatch.setattr("stages.contract.digests._THREADS", 1)
    monkeypatch.setattr(type(reached.store.bucket), "upload", break_after_two)
    with pytest.raises(StoreError, match="cannot be reached"):
        reached.make()
    assert list(far.store.artifacts()) == []
    assert list(near.store.artifacts()) == []
    monkeypatch.setattr(type(reached.store.bucket), "upload", upload)
    gate.open()
    before = near.store.bucket.list()
    artifact = reached.make()
    assert len(reached.requests) == 1, "the stage ran again"
    assert artifact.manifest == far.make().manifest
    after = near.store.bucket.list()
    for name in uploaded:
        assert after[name].modified == before[name].modified, "uploaded again"
    gate.end()


def test_a_registration_that_another_host_overtakes_is_made_again(near, far):
    checkpoint = near.make().ref("checkpoint")
    calls = []

    def register(context):
        if not calls:
            ModelRegistry(far.store).register("tiny", checkpoint, metrics={}, run="far")
        another = checkpoint.model_copy(update={"digest": "f" * 64})
        calls.append(ModelRegistry(context.store).register("tiny", another, metrics={}, run="near"))
        (context.out / "done").write_text("")

    near.body = register
    request = near.request("register").model_copy(update={"writes_registry": True})
    near.runner.run(request, near.events.append)
    assert "another host changed the model registry; decides again" in near.said()
    assert [call.version for call in calls] == [1, 2]
    versions = ModelRegistry(far.store).all_versions()
    assert sorted((version.version, version.run) for version in versions) == [
        (1, "far"),
        (2, "near"),
    ]


def test_secrets_of_buckets_reach_stages_of_a_folder_only(
    url, store, probe_stage, tmp_path, monkeypatch
):
    monkeypatch.setenv("GEB_CACHE", str(tmp_path / "cache"))
    open_store(url, create=True)
    name = "AWS_SECRET_ACCESS_KEY"
    for location, value in ((url, None), (str(store.root), SECRET)):
        request = probe_request(store, behaviour="tell_environment", message=name)
        heard = []
        runner = make_runner(Execution())
        runner.run(request.model_copy(update={"store": location}), heard.append)
        assert f"{name} is {value}" in said(heard)


def test_a_stage_that_is_not_to_start_fetches_no_inputs(near, far):
    artifact = near.make()
    far.runner.closed.set()
    with pytest.raises(StoppedError):
        far.make("read", artifact.ref())
    assert "weights" not in local_files(far.store)
