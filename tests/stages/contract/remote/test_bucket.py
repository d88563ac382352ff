"""Calls of the store to object storage, and the messages where they fail."""

import pytest
from obstore.exceptions import GenericError

from stages.contract.errors import ConflictError, StoreError, UserError
from stages.store.opening import open_store
from stages.store.remote.bucket import Bucket
from tests.object_storage import (
    BUCKET,
    PAGE,
    SECRET,
    Gate,
    aws_environment,
    make_bucket,
    objects,
    s3_server,
)


@pytest.fixture(params=["url", "az_url"])
def place(request):
    """A prefix of each kind of storage that nothing is in."""
    return request.getfixturevalue(request.param)


def test_objects_are_written_on_condition_listed_and_deleted(place):
    bucket, name = Bucket(place), "folder/a~b c%.json"
    # A write whose answer was lost is made again, and does not conflict with itself.
    for _ in range(2):
        bucket.put(name, b"1", absent=True)
    first = bucket.get(name)
    with pytest.raises(ConflictError):
        bucket.put(name, b"2", absent=True)
    bucket.put(name, b"2", replaces=first)
    for key in (name, "never"):
        with pytest.raises(ConflictError):
            bucket.put(key, b"3", replaces=first)
    bucket.put("folder/empty", b"")
    listed = bucket.list("folder")
    assert {name: key.size for name, key in listed.items()} == {"a~b c%.json": 1, "empty": 0}
    assert listed["a~b c%.json"].etag == bucket.get(name).etag
    bucket.delete(["folder/never", "folder/empty", name])
    assert objects(place) == {}


def test_a_request_is_made_again_when_its_answer_is_garbled(url, monkeypatch):
    bucket, calls = Bucket(url), []
    client = bucket._client

    class Garbled:
        """Every second request has an answer."""

        def __getattr__(self, name):
            def request(*arguments, **more):
                calls.append(name)
                if len(calls) % 2:
                    raise GenericError("error decoding the body")
                return getattr(client, name)(*arguments, **more)

            return request

    monkeypatch.setattr(bucket, "_client", Garbled())
    bucket.put("a", b"1", absent=True)
    assert (list(bucket.list()), bucket.get("a").data) == (["a"], b"1")
    assert next(bucket.stream("a", 1)) == b"1"
    bucket.delete(["a"])
    assert len(calls) == 10


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
    assert b"".join(bucket.stream("large", len(data))) == data


def test_a_bucket_that_is_not_there_is_named(place):
    scheme = place.partition(":")[0]
    with pytest.raises(UserError, match="no bucket 'elsewhere' at http://127") as caught:
        open_store(f"{scheme}://elsewhere/store", create=True)
    variable = {"s3": "AWS_ENDPOINT_URL", "az": "AZURE_STORAGE_ENDPOINT"}[scheme]
    assert variable in caught.value.remedy


def test_a_store_that_is_not_there_is_a_failure(url):
    with pytest.raises(StoreError, match=r"no store at .* has no store.json"):
        open_store(url)


def test_a_prefix_with_other_objects_is_refused(url):
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


@pytest.mark.parametrize(
    ("key", "said"), [("d3Jvbmc=", "refuses these credentials"), ("", "no credentials for bucket")]
)
def test_wrong_credentials_of_azure_are_a_persons_mistake(az_url, monkeypatch, key, said):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    if not key:
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(UserError, match=said) as caught:
        open_store(az_url, create=True)
    assert "AZURE_STORAGE_ACCOUNT_KEY" in caught.value.remedy
    assert "d3Jvbmc=" not in str(caught.value)
