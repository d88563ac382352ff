"""Stages of hosts that share a bucket: what travels, what is seen, and what is computed again."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flows.inputs import resolve
from flows.runners.mirrored import Mirrored
from flows.runners.outside import offer_inputs
from stages.contract.context import StageContext
from stages.contract.errors import DamagedArtifactError, StoppedError, StoreError, UserError
from stages.contract.events import Event, Log, Progress
from stages.contract.params import StageParams
from stages.contract.program import Stage, execute
from stages.contract.remote.store import RemoteStore
from stages.contract.request import Input, Request, make_request
from tests.object_storage import SECRET, Gate, client, host, objects
from tests.stage_calls import EventLog, file_input


class MakeParams(StageParams):
    stage: ClassVar[str] = "make"
    version: ClassVar[str] = "1"
    text: str = "made"


@dataclass
class Host:
    """A host of the bucket, whose stages run in this process.

    Attributes:
        store: The store as it sees it.
        body: What the stage does.
        requests: What its stages were asked.
        events: What they said.
    """

    store: RemoteStore
    body: Callable[[StageContext[Any]], None]
    sync_seconds: float = 1000.0
    name: str = "in this process"
    requests: list[Request] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = Mirrored(self, self.sync_seconds)

    def run(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Runs a stage of which everything is here."""
        self.requests.append(request)
        log = EventLog()
        execute(Stage(MakeParams, self.body), request, log)

    def stop_all(self) -> None:
        """Nothing to stop."""

    def adopts(self, request: Request) -> bool:
        """Nothing outlives this process."""
        return False

    def make(self, text: str = "made", *inputs: Input) -> Any:
        """Makes an artifact through the bucket and returns it as this host finds it."""
        request = self.request(text, *inputs)
        os.environ["GEB_CACHE"] = str(self.store.root.parent)
        self.runner.run(request, self.events.append)
        return self.store.load(request.stage, request.key)

    def request(self, text: str, *inputs: Input) -> Request:
        """A request as an orchestrator makes it."""
        return make_request(
            MakeParams(text=text),
            inputs={"parts": inputs} if inputs else {},
            seed=0,
            store=self.store.location,
        )

    def said(self) -> str:
        """Everything that was logged."""
        return "\n".join(each.message for each in self.events if isinstance(each, Log))


def write(context: StageContext[Any]) -> None:
    """Two files and a folder."""
    text = context.params.text
    (context.out / "large.txt").write_text(text * 1000)
    (context.out / "checkpoint").mkdir()
    (context.out / "checkpoint/weights").write_text(text + " weights")
    (context.out / "checkpoint/tokens").write_text(text + " tokens")


@pytest.fixture
def near(here: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("GEB_CACHE", "set by each host")
    return Host(here, write)


@pytest.fixture
def far(there: RemoteStore, near: Host) -> Host:
    return Host(there, write)


def local_files(store: RemoteStore) -> set[str]:
    folder = store.root / "artifacts"
    return {path.relative_to(folder).parts[2:][-1] for path in folder.rglob("*") if path.is_file()}


def object_of(store: RemoteStore, name: str) -> tuple[str, str]:
    """Bucket and key of the one object with this name."""
    [found] = [each for each in objects(store.location) if each.endswith(name)]
    return store.bucket.name, f"{store.bucket.prefix}/{found}"


def test_a_hit_on_another_host_brings_the_manifest_and_files_on_demand(near: Host, far: Host):
    made = near.make()
    found = far.make()
    assert far.requests == []
    assert found.manifest == made.manifest
    assert local_files(far.store) == {"manifest.json"}
    assert found.file("checkpoint/weights").read_text() == "made weights"
    assert local_files(far.store) == {"manifest.json", "weights"}


def test_a_stage_is_given_the_inputs_that_it_names_and_a_local_folder(near: Host, far: Host):
    made = near.make()

    def read(context: StageContext[Any]) -> None:
        names = sorted(each.name for each in context.path("parts").iterdir())
        (context.out / "names").write_text(" ".join(names))

    far.body = read
    result = far.make("read", made.ref("checkpoint"))
    assert result.file("names").read_text() == "tokens weights"
    assert "large.txt" not in local_files(far.store)
    [request] = far.requests
    assert request.store == str(far.store.root)
    assert near.store.load("make", request.key).file("names").read_text() == "tokens weights"


def test_no_secret_and_no_place_of_the_bucket_is_in_what_is_kept(near: Host, far: Host):
    made = near.make()
    far.make("read", made.ref())
    kept = list(objects(near.store.location).values())
    kept += [path.read_bytes() for path in far.store.root.rglob("*") if path.is_file()]
    assert len(kept) > 8
    assert not any(SECRET.encode() in data for data in kept)
    requests = "".join(each.model_dump_json() for each in far.requests)
    assert far.store.location not in requests


def test_nothing_is_visible_before_the_commit_and_a_later_push_goes_on(
    near: Host, far: Host, s3: int, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
    reached = Host(host(near.store.location, near.store.root.parent), write)
    upload = type(reached.store.bucket).upload
    uploaded: list[str] = []

    def break_after_two(bucket: Any, path: Path, name: str) -> None:
        if len(uploaded) == 2:
            gate.close()
        upload(bucket, path, name)
        uploaded.append(name)

    monkeypatch.setattr("stages.contract.remote.transfer.PARALLEL_TRANSFERS", 1)
    monkeypatch.setattr(type(reached.store.bucket), "upload", break_after_two)
    with pytest.raises(StoreError, match="cannot be reached"):
        reached.make()
    assert list(far.store.artifacts()) == []
    assert list(near.store.artifacts()) == []
    monkeypatch.setattr(type(reached.store.bucket), "upload", upload)
    gate.open()
    first = dict(client().list_objects_v2(Bucket=near.store.bucket.name))["Contents"]
    when = {each["Key"]: each["LastModified"] for each in first}
    made = reached.make()
    assert len(reached.requests) == 1, "the stage ran again"
    assert made.manifest == far.make().manifest
    after = dict(client().list_objects_v2(Bucket=near.store.bucket.name))["Contents"]
    again = {each["Key"]: each["LastModified"] for each in after}
    for name in uploaded:
        key = f"{near.store.bucket.prefix}/{name}"
        assert again[key] == when[key], "uploaded again"
    gate.end()


def alter(store: RemoteStore, bucket: str, key: str) -> None:
    body = bytearray(client().get_object(Bucket=bucket, Key=key)["Body"].read())
    body[0] ^= 1
    client().put_object(Bucket=bucket, Key=key, Body=bytes(body))


def truncate(store: RemoteStore, bucket: str, key: str) -> None:
    client().put_object(Bucket=bucket, Key=key, Body=b"x")


def delete(store: RemoteStore, bucket: str, key: str) -> None:
    client().delete_object(Bucket=bucket, Key=key)


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (alter, "weights", "has changed"),
        (truncate, "large.txt", "has 1 bytes, not 4000"),
        (delete, "tokens", "is missing"),
        (truncate, ".json", "is unreadable"),
    ],
)
def test_damage_in_the_bucket_is_noticed_set_aside_and_computed_again(
    near: Host, far: Host, damage: Any, name: str, said: str
):
    made = near.make()
    name = f"{made.manifest.key}.json" if name == ".json" else name
    if name.endswith(".json"):
        key = f"{near.store.bucket.prefix}/commits/make/{name}"
        damage(near.store, near.store.bucket.name, key)
    else:
        damage(near.store, *object_of(near.store, name))
    again = far.make()
    assert said in far.said()
    assert "Set aside in s3://" in far.said()
    assert len(far.requests) == 1
    assert again.file("checkpoint/weights").read_text() == "made weights"
    assert [each.kind for each in far.store.held()].count("aside") == 1
    assert near.store.load("make", made.manifest.key).manifest == again.manifest


def test_a_good_copy_here_mends_what_is_damaged_in_the_bucket(near: Host):
    made = near.make()
    alter(near.store, *object_of(near.store, "weights"))
    again = near.make()
    assert len(near.requests) == 1, "the stage ran again"
    near.store.verify(again)
    assert again.manifest == made.manifest


def test_damage_that_keeps_its_etag_is_noticed_when_an_input_arrives(near: Host, far: Host):
    made = near.make()
    commit = near.store._commits.get("make", made.manifest.key)
    alter(near.store, *object_of(near.store, "weights"))
    listed = near.store.bucket.list(commit.folder)
    etags = {name: listed[name].etag for name in commit.etags}
    near.store._commits.update(commit.model_copy(update={"etags": etags}))
    with pytest.raises(DamagedArtifactError, match=r"has changed.* Set aside in s3://"):
        far.make("read", made.ref("checkpoint"))
    assert far.requests == []
    assert far.store.load("make", made.manifest.key) is None


def test_the_same_content_under_another_etag_is_no_damage(near: Host, far: Host):
    near.make()
    bucket, key = object_of(near.store, "large.txt")
    s3 = client()
    upload = s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    body = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    part = s3.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=body)
    s3.complete_multipart_upload(
        Bucket=bucket,
        Key=key,
        UploadId=upload,
        MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
    )
    far.make()
    assert far.requests == []
    assert far.said() == "the store has it by now"


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


def test_large_transfers_are_shown(near: Host, far: Host):
    def large(context: StageContext[Any]) -> None:
        (context.out / "weights").write_bytes(os.urandom(3 << 20))

    near.body = large
    made = near.make()
    assert Progress(done=3, total=3, unit="MiB uploaded") in near.events
    far.make("read", made.ref())
    assert Progress(done=3, total=3, unit="MiB of inputs") in far.events


def test_an_interrupted_download_goes_on(near: Host, far: Host, monkeypatch: pytest.MonkeyPatch):
    data = os.urandom(100_000)
    near.body = lambda context: (context.out / "weights").write_bytes(data) and None
    made = near.make()
    monkeypatch.setattr("stages.contract.remote.transfer._RANGE_BYTES", 10_000)
    monkeypatch.setattr("stages.contract.remote.transfer._PARALLEL_RANGES", 1)
    bucket = type(far.store.bucket)
    read, starts = bucket.read_range, []

    def breaks(self: Any, name: str, start: int, stop: int) -> bytes:
        starts.append(start)
        if len(starts) == 5:
            raise StoreError("the network is gone")
        return read(self, name, start, stop)

    monkeypatch.setattr(bucket, "read_range", breaks)
    found = far.store.load("make", made.manifest.key)
    with pytest.raises(StoreError):
        found.file("weights")
    assert not (found.path / "weights").exists()
    assert found.file("weights").read_bytes() == data
    assert starts == [0, 10_000, 20_000, 30_000, 40_000, *range(40_000, 100_000, 10_000)]


def read_input(context: StageContext[Any]) -> None:
    """Keeps what the files of its input hold."""
    place = context.path("parts")
    files = [place] if place.is_file() else sorted(place.iterdir())
    held = [f"{each.name}: {each.read_text()}" for each in files]
    (context.out / "read").write_text("; ".join(held))


@pytest.mark.parametrize("change", ["removed", "another file"])
def test_files_from_outside_are_offered_to_other_hosts(
    near: Host, far: Host, tmp_path: Path, change: str
):
    path = tmp_path / "prompts.jsonl"
    path.write_text("prompt")
    source = file_input(path)
    os.environ["GEB_CACHE"] = str(near.store.root.parent)
    offer_inputs(near.request("read", source))
    offer_inputs(near.request("read", source))
    path.unlink()
    if change == "another file":
        path.write_text("PROMPT")
    far.body = read_input
    assert far.make("read", source).file("read").read_text() == "prompts.jsonl: prompt"


def test_a_folder_from_outside_is_offered_whole(near: Host, far: Host, tmp_path: Path):
    folder = tmp_path / "model"
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache/index").write_text("hidden")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    source = resolve(str(folder), "model")
    os.environ["GEB_CACHE"] = str(near.store.root.parent)
    offer_inputs(near.request("read", source))
    folder.rename(tmp_path / "elsewhere")
    far.body = read_input
    read = far.make("read", source).file("read").read_text()
    assert read == "config.json: {}; tokenizer.json: {}"


def test_a_file_that_is_nowhere_is_a_persons_mistake(far: Host, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("prompt")
    source = file_input(path)
    path.unlink()
    with pytest.raises(UserError, match=r"prompts\.jsonl is not on"):
        far.make("read", source)


def test_a_file_that_changed_is_not_offered(near: Host, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("prompt")
    source = file_input(path)
    path.write_text("another")
    os.environ["GEB_CACHE"] = str(near.store.root.parent)
    with pytest.raises(UserError, match="has changed since"):
        offer_inputs(near.request("read", source))
