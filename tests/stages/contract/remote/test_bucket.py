"""Calls of the store to object storage, and the messages where they fail."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

from stages.contract.errors import StoreError, UserError
from stages.contract.remote.bucket import Bucket
from stages.contract.remote.errors import ConflictError
from stages.contract.stores import open_store
from tests.object_storage import (
    BUCKET,
    PAGE,
    SECRET,
    Gate,
    aws_environment,
    host,
    make_bucket,
    objects,
    s3_server,
)


def test_objects_are_written_on_condition(url):
    bucket = Bucket(url)
    first = bucket.put("a", b"1", absent=True)
    with pytest.raises(ConflictError):
        bucket.put("a", b"2", absent=True)
    second = bucket.put("a", b"2", replaces=first)
    with pytest.raises(ConflictError):
        bucket.put("a", b"3", replaces=first)
    with pytest.raises(ConflictError):
        bucket.put("never", b"3", replaces=second)
    assert objects(url) == {"a": b"2"}


def test_a_write_whose_answer_was_lost_is_not_a_conflict_with_itself(url):
    bucket = Bucket(url)
    etag = bucket.put("a", b"same", absent=True)
    assert bucket.put("a", b"same", absent=True) == etag


def test_listings_go_on_after_the_first_page(url):
    bucket = Bucket(url)
    names = [f"folder/{i:04}" for i in range(PAGE + 1)]
    for name in names:
        bucket.put(name, b"x")
    assert [f"folder/{name}" for name in bucket.list("folder")] == names
    bucket.delete(names)
    assert bucket.list("folder") == {}


def test_a_file_of_several_parts_arrives_whole(url, tmp_path):
    data = bytes(range(256)) * (160 << 10)
    (tmp_path / "large").write_bytes(data)
    bucket = Bucket(url)
    bucket.upload(tmp_path / "large", "large")
    assert bucket.list()["large"].size == len(data)
    assert bucket.read_range("large", 32 << 20, (32 << 20) + 8) == data[:8]


@pytest.mark.parametrize("location", ["ftp://bucket/store", "s3://", "s3://key:secret@bucket/x"])
def test_other_urls_are_refused(location):
    with pytest.raises(UserError, match="is not supported") as caught:
        open_store(location)
    assert "s3://bucket/prefix" in caught.value.remedy


def test_a_bucket_that_is_not_there_is_named(aws):
    with pytest.raises(UserError, match="no bucket 'elsewhere' at http://127") as caught:
        open_store("s3://elsewhere/store", create=True)
    assert "AWS_ENDPOINT_URL" in caught.value.remedy


def test_a_store_that_is_not_there_is_a_failure(url):
    with pytest.raises(StoreError, match=r"no store at .* has no store.json"):
        open_store(url)


def test_a_prefix_with_something_else_is_no_store(url):
    Bucket(url).put("thesis.tex", b"text")
    with pytest.raises(UserError, match=r"not empty and holds no store\.json"):
        open_store(url, create=True)
    assert objects(url) == {"thesis.tex": b"text"}


def test_an_endpoint_that_does_not_answer_is_a_failure(url, s3, monkeypatch):
    gate = Gate(s3)
    gate.end()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
    with pytest.raises(StoreError) as caught:
        open_store(url, create=True)
    message = str(caught.value)
    assert f"bucket '{BUCKET}' at http://127.0.0.1:{gate.port} cannot be reached" in message
    assert "AWS_ENDPOINT_URL" in message
    assert SECRET not in message


def test_no_credentials_are_a_persons_mistake(url, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match="no credentials for bucket") as caught:
        open_store(url)
    assert "AWS_ACCESS_KEY_ID" in caught.value.remedy


def test_wrong_credentials_are_a_persons_mistake(monkeypatch):
    # One call is free: the one that makes the bucket.
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="1") as port:
        for name, value in aws_environment(port).items():
            monkeypatch.setenv(name, value)
        make_bucket()
        with pytest.raises(UserError, match="refuses these credentials") as caught:
            open_store(f"s3://{BUCKET}/store", create=True)
    assert SECRET not in str(caught.value)


def test_a_storage_that_ignores_conditions_is_refused(s3, monkeypatch, tmp_path):
    # moto understands Google's requests, which are S3's, but for conditions on generations.
    monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{s3}")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", SECRET)
    url = f"gs://{BUCKET}/{uuid.uuid4().hex}"
    with pytest.raises(UserError, match="ignores If-None-Match or If-Match"):
        host(url, tmp_path, create=True)
    assert set(objects(url)) == {"store.json"}
    with pytest.raises(UserError, match="no bucket 'elsewhere' at http://127") as caught:
        open_store("gs://elsewhere/store")
    assert "GOOGLE_BASE_URL" in caught.value.remedy


def test_a_local_folder_is_not_taken_for_the_store(here):
    with pytest.raises(UserError, match="is the local folder of the store") as caught:
        open_store(str(here.root))
    assert here.location in caught.value.remedy


def test_endpoints_have_local_folders_of_their_own(here, s3, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{s3}")
    assert host(here.location, tmp_path / "here").root != here.root


def test_a_client_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setenv("AWS_REGION", "where no client is at hand yet")
    with pytest.raises(UserError, match="needs obstore") as caught:
        open_store("s3://bucket/store")
    assert "geb[bucket]" in caught.value.remedy


def test_a_folder_is_opened_as_ever(tmp_path: Path):
    store = open_store(str(tmp_path / "store"), create=True)
    assert store.location == str(tmp_path / "store")
    assert store.mirror_of is None


@pytest.mark.parametrize("patience", ["soon", "nan", "-1", "1 minute"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(monkeypatch, patience):
    monkeypatch.setenv("GEB_STORE_PATIENCE_SECONDS", patience)
    with pytest.raises(UserError, match=f"GEB_STORE_PATIENCE_SECONDS is '{patience}'") as caught:
        Bucket("s3://anywhere/store")
    assert caught.value.remedy
