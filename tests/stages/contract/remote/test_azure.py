"""A store in Azure Blob Storage, on Azurite: what differs from S3 and everything a run does."""

from __future__ import annotations

import threading

import pytest

from flows.runners.local.bucket_inputs import upload_inputs
from stages.contract.errors import StoreError, UserError
from stages.contract.registry import ModelRegistry
from stages.contract.remote import lease as lease_module
from stages.contract.remote.bucket import Bucket
from stages.contract.remote.errors import ConflictError
from stages.contract.stores import open_store
from tests.azure_storage import CONTAINER, azure_environment
from tests.flows.bucket_sync.hosts import Host, write
from tests.object_storage import host, objects
from tests.stage_calls import file_input


@pytest.fixture
def near(az_url, tmp_path, monkeypatch):
    monkeypatch.setenv("GEB_CACHE", "set by each host")
    return Host(host(az_url, tmp_path / "near", create=True), write)


@pytest.fixture
def far(az_url, near, tmp_path):
    return Host(host(az_url, tmp_path / "far"), write)


def test_objects_are_written_on_condition_listed_and_deleted(az_url):
    bucket = Bucket(az_url)
    first = bucket.put("folder/a~b c%.json", b"1", absent=True)
    assert bucket.put("folder/a~b c%.json", b"1", absent=True) == first
    with pytest.raises(ConflictError):
        bucket.put("folder/a~b c%.json", b"2", absent=True)
    second = bucket.put("folder/a~b c%.json", b"2", replaces=first)
    with pytest.raises(ConflictError):
        bucket.put("folder/a~b c%.json", b"3", replaces=first)
    with pytest.raises(ConflictError):
        bucket.put("never", b"3", replaces=second)
    bucket.put("folder/empty", b"")
    listed = bucket.list("folder")
    assert {name: each.size for name, each in listed.items()} == {"a~b c%.json": 1, "empty": 0}
    assert listed["a~b c%.json"].etag == second.etag
    bucket.delete(["folder/never", "folder/empty", "folder/a~b c%.json"])
    assert objects(az_url) == {}


def test_a_file_of_several_parts_arrives_whole(az_url, tmp_path):
    data = bytes(range(256)) * (80 << 10)
    (tmp_path / "large").write_bytes(data)
    bucket = Bucket(az_url)
    bucket.upload(tmp_path / "large", "large")
    assert bucket.list()["large"].size == len(data)
    assert bucket.read_range("large", 16 << 20, (16 << 20) + 8) == data[:8]
    with pytest.raises(FileNotFoundError):
        bucket.read_range("large", len(data), len(data) + 8)


def test_hosts_share_artifacts_state_inputs_and_models(near, far, tmp_path):
    def fail(context):
        (context.work / "step").write_text("half")
        raise RuntimeError

    def go_on(context):
        (context.out / "whole").write_text((context.work / "step").read_text())

    near.body, far.body = fail, go_on
    with pytest.raises(RuntimeError):
        near.make()
    made = far.make()
    assert near.make().file("whole").read_text() == "half"
    assert [len(near.requests), len(far.requests)] == [1, 1]

    path = tmp_path / "prompts.jsonl"
    path.write_text("prompt")
    source = file_input(path)
    upload_inputs(near.request("read", source))
    path.unlink()
    far.body = lambda context: (context.out / "read").write_text(context.path("parts").read_text())
    assert far.make("read", source).file("read").read_text() == "prompt"

    for each in ("one", "two"):
        ModelRegistry(near.store).register(
            "tiny", made.ref().model_copy(update={"digest": each}), metrics={}
        )
        ModelRegistry(far.store).set_alias("tiny", "production", int(each == "two") + 1)
    assert ModelRegistry(near.store).rollback("tiny", "production").version == 1


def test_one_host_holds_a_lease_until_it_expires(near, far, monkeypatch):
    monkeypatch.setattr(lease_module, "_machine", lambda: "near")
    lease = near.store.lease("make", "key")
    with lease:
        lease.acquire()
        monkeypatch.setattr(lease_module, "_machine", lambda: "far")
        waiting = threading.Event()
        other = far.store.lease("make", "key")
        monkeypatch.setattr(type(other), "poll_seconds", 0.01)

        def expire(holder):
            assert holder["machine"] == "near"
            waiting.set()
            monkeypatch.setattr(lease_module, "EXPIRY_SECONDS", -1.0)

        with other:
            assert other.acquire(waiting=expire) is False
    assert waiting.is_set()


def test_a_container_that_is_not_there_is_named(az_url):
    with pytest.raises(UserError, match="no bucket 'elsewhere' at http://127") as caught:
        open_store("az://elsewhere/store", create=True)
    assert "AZURE_STORAGE_ENDPOINT" in caught.value.remedy


@pytest.mark.parametrize(
    ("key", "said"), [("d3Jvbmc=", "refuses these credentials"), ("", "no credentials for bucket")]
)
def test_wrong_credentials_are_a_persons_mistake(az_url, monkeypatch, key, said):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    if not key:
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(UserError, match=said) as caught:
        open_store(az_url, create=True)
    assert "AZURE_STORAGE_ACCOUNT_KEY" in caught.value.remedy
    assert "d3Jvbmc=" not in str(caught.value)


def test_a_storage_that_does_not_answer_is_a_failure(az_url, monkeypatch):
    for name, value in azure_environment(9).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=f"bucket '{CONTAINER}' at http://127.0.0.1:9"):
        open_store(az_url)
