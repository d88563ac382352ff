"""One holder among all hosts, whatever happens to it."""

from __future__ import annotations

import json
import threading

import pytest

from stages.contract.errors import LeaseLostError, StoreError, UserError
from stages.contract.remote import lease as lease_module
from stages.contract.remote.bucket import Bucket
from stages.contract.remote.lease import RemoteLease

NAME = "leases/make/key.json"


@pytest.fixture
def bucket(url: str) -> Bucket:
    return Bucket(url)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteLease, "poll_seconds", 0.01)


def put_elsewhere(bucket: Bucket, **changes: object) -> None:
    """A lease as a holder on another machine writes it."""
    with RemoteLease(bucket, NAME) as lease:
        lease.acquire()
        found = bucket.get(NAME)
        assert found is not None
        record = json.loads(found.data) | {"machine": "another", "owner": "another"} | changes
    bucket.put(NAME, json.dumps(record).encode())


def test_a_free_lease_is_taken_at_once_and_freed(bucket):
    lease = RemoteLease(bucket, NAME)
    assert lease.acquire() is True
    holder = RemoteLease(bucket, NAME).holder()
    assert holder is not None and {"host", "pid", "since"} <= set(holder)
    lease.release()
    assert RemoteLease(bucket, NAME).holder() is None
    assert RemoteLease(bucket, NAME).acquire() is True


def test_one_of_many_gets_it_at_a_time(bucket):
    holders = []
    overlaps = []

    def hold() -> None:
        with RemoteLease(bucket, NAME) as lease:
            lease.acquire()
            holders.append(1)
            overlaps.append(len(holders))
            bucket.get(NAME)
            holders.pop()

    threads = [threading.Thread(target=hold) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert overlaps == [1] * 6


def test_a_holder_elsewhere_counts_until_it_expires(bucket, monkeypatch):
    put_elsewhere(bucket)
    waited = []
    stopping = threading.Event()
    lease = RemoteLease(bucket, NAME)

    def waits(holder: dict[str, object]) -> None:
        waited.append(holder["machine"])
        # Its clock may say what it likes: only the storage's counts.
        monkeypatch.setattr(lease_module, "EXPIRY_SECONDS", -1.0)

    with lease:
        assert lease.acquire(waiting=waits, stopping=stopping) is False
    assert waited == ["another"]


def test_the_clock_of_another_host_does_not_matter(bucket):
    put_elsewhere(bucket, since=0.0, expires=0.0)
    assert RemoteLease(bucket, NAME).holder() is not None


def test_a_dead_holder_on_this_machine_is_noticed_at_once(bucket):
    with RemoteLease(bucket, NAME) as lease:
        lease.acquire()
        found = bucket.get(NAME)
        assert found is not None
        record = json.loads(found.data)
    bucket.put(NAME, json.dumps(record | {"process_start": "1"}).encode())
    assert RemoteLease(bucket, NAME).holder() is None


def test_a_lease_taken_over_is_noticed_and_not_freed(bucket, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    lease = RemoteLease(bucket, NAME)
    lease.acquire()
    lease.check()
    found = bucket.get(NAME)
    assert found is not None
    other = json.dumps(json.loads(found.data) | {"owner": "another", "machine": "another"})
    bucket.put(NAME, other.encode())
    assert lease._lost.wait(30)
    with pytest.raises(LeaseLostError, match="taken over"):
        lease.check()
    lease.release()
    found = bucket.get(NAME)
    assert found is not None and found.data == other.encode()


def test_a_living_holder_renews(bucket, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    with RemoteLease(bucket, NAME) as lease:
        lease.acquire()
        before = bucket.get(NAME)
        while (now := bucket.get(NAME)) is not None and now.version == before.version:
            pass
        lease.check()


@pytest.mark.parametrize(
    "error",
    [StoreError("no network"), UserError("expired credentials"), OSError("no answer of SSO")],
)
def test_a_holder_that_cannot_renew_for_long_gives_up(bucket, monkeypatch, error):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(lease_module, "EXPIRY_SECONDS", 0.05)
    lease = RemoteLease(bucket, NAME)
    lease.acquire()

    def unreachable(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(Bucket, "put", unreachable)
    assert lease._lost.wait(30)
    lease.release()


def test_what_could_not_be_given_back_is_free_for_its_own_process(bucket, monkeypatch):
    put = Bucket.put
    lease = RemoteLease(bucket, NAME)
    lease.acquire()

    def unreachable(*_: object, **__: object) -> str:
        raise StoreError("no network")

    monkeypatch.setattr(Bucket, "put", unreachable)
    lease.release()
    monkeypatch.setattr(Bucket, "put", put)
    assert RemoteLease(bucket, NAME).holder() is None


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[1]", b'{"pid": 5}', b"null"])
def test_a_damaged_one_counts_until_it_expires(bucket, monkeypatch, data):
    bucket.put(NAME, data)
    lease = RemoteLease(bucket, NAME)
    assert lease.holder() == {"host": "unknown", "pid": "unknown"}
    monkeypatch.setattr(lease_module, "EXPIRY_SECONDS", -1.0)
    assert lease.holder() is None
    with lease:
        assert lease.acquire() is True
