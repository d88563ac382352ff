"""One computation among hosts that share a bucket: who computes, and from where it goes on."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest

from stages.contract.context import StageContext
from stages.contract.errors import StoppedError
from stages.contract.events import Event
from stages.contract.remote.store import RemoteStore
from tests.flows.bucket_sync.hosts import Host, write
from tests.object_storage import client, objects


def test_of_two_hosts_one_computes_and_the_other_hits(near: Host, far: Host):
    started, may_end = threading.Event(), threading.Event()

    def slow(context: StageContext[Any]) -> None:
        started.set()
        assert may_end.wait(60)
        write(context)

    near.body = slow
    os.environ["GEB_CACHE"] = str(near.store.root.parent)
    first = threading.Thread(target=near.make)
    first.start()
    assert started.wait(60)
    waits = threading.Event()
    hear = far.events.append

    def note(event: Event) -> None:
        hear(event)
        waits.set()

    far.events = type("Heard", (list,), {"append": lambda self, event: note(event)})()
    second = threading.Thread(target=far.make)
    second.start()
    assert waits.wait(60)
    may_end.set()
    first.join(60)
    second.join(60)
    assert (len(near.requests), len(far.requests)) == (1, 0)


def test_a_wait_for_another_host_can_be_stopped(near: Host, far: Host):
    made = near.make()
    lease = near.store.lease("make", made.manifest.key)
    near.store.remove(next(iter(near.store.held())))
    with lease:
        lease.acquire()
        far.runner.stop_all()
        with pytest.raises(StoppedError, match="waiting for the lease"):
            far.make()
    assert far.requests == []


def test_another_host_goes_on_from_where_an_attempt_ended(near: Host, far: Host):
    def fail(context: StageContext[Any]) -> None:
        (context.work / "chunks").mkdir()
        (context.work / "chunks/1").write_text("first half")
        (context.work / "chunks/same").write_text("first half")
        raise RuntimeError("the host burns")

    def go_on(context: StageContext[Any]) -> None:
        assert (context.work / "chunks/same").read_text() == "first half"
        done = (context.work / "chunks/1").read_text()
        (context.out / "whole").write_text(done + ", second half")

    near.body, far.body = fail, go_on
    with pytest.raises(RuntimeError):
        near.make()
    made = far.make()
    assert made.file("whole").read_text() == "first half, second half"
    assert "attempt on another host" in far.said()
    assert not any(name.startswith("work/") for name in objects(near.store.location))


def test_what_this_host_has_of_its_own_attempt_is_newer_than_the_bucket(near: Host):
    def fail(context: StageContext[Any]) -> None:
        (context.work / "step").write_text("1")
        raise RuntimeError

    seen = []

    def go_on(context: StageContext[Any]) -> None:
        seen.append((context.work / "step").read_text())
        write(context)

    near.body = fail
    with pytest.raises(RuntimeError):
        near.make()
    [work] = (near.store.root / "work/make").iterdir()
    (work / "step").write_text("2")
    near.body = go_on
    near.make()
    assert seen == ["2"]


def test_a_running_stage_is_saved_now_and_then(near: Host, far: Host):
    def long(context: StageContext[Any]) -> None:
        (context.work / "step-1").write_text("1")
        while not (found := _snapshots(near.store)) or "step-1" not in found[0]["files"]:
            pass
        (context.work / "step-2").write_text("2")
        (context.work / "step-1").unlink()
        while not (found := _snapshots(near.store)) or set(found[0]["files"]) != {"step-2"}:
            pass
        # The host is gone at once: what comes after the last snapshot is lost.
        near.store.bucket.put = None
        raise RuntimeError

    def go_on(context: StageContext[Any]) -> None:
        assert [each.name for each in context.work.iterdir()] == ["step-2"]
        write(context)

    near = Host(near.store, long, sync_seconds=0.01)
    with pytest.raises(RuntimeError):
        near.make()
    far.body = go_on
    _expire_leases(near.store)
    far.make()
    assert len(far.requests) == 1


def _snapshots(store: RemoteStore) -> list[dict[str, Any]]:
    found = objects(store.location)
    return [json.loads(data) for name, data in found.items() if name.endswith("snapshot.json")]


def _expire_leases(store: RemoteStore) -> None:
    for name in objects(store.location):
        if name.startswith("leases/"):
            key = f"{store.bucket.prefix}/{name}"
            client().put_object(Bucket=store.bucket.name, Key=key, Body=b"")
