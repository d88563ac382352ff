"""All that takes room in a store's folder, and its removal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stages.contract.local_store import LocalStore
from stages.contract.store import Held, Kind
from tests.writer_stage import compute, request

KEY = "0123456789abcdef" * 4
WRITTEN = 1_700_000_000.0

# Kind, stage, key, file that holds the room, place of what is told of (the file itself if None).
LEFT: list[tuple[Kind, str, str, str, str | None]] = [
    ("work", "train", KEY, f"work/train/{KEY}/step-1/state", f"work/train/{KEY}"),
    (
        "scratch",
        "train",
        KEY,
        f"artifacts/train/.scratch-{KEY[:16]}-01234567/checkpoint/weights",
        f"artifacts/train/.scratch-{KEY[:16]}-01234567",
    ),
    # A key of which no lease is left: its beginning is all that anybody knows.
    (
        "scratch",
        "pair",
        "fedcba9876543210",
        "artifacts/pair/.scratch-fedcba9876543210-01234567/pairs.parquet",
        "artifacts/pair/.scratch-fedcba9876543210-01234567",
    ),
    ("aside", "", "", "quarantine/pair-0123-now/pairs.parquet", "quarantine/pair-0123-now"),
    ("temporary", "", "", ".store.json.01234567", None),
    ("temporary", "", "", "runs/nightly/steps/.train.json.01234567", None),
    ("temporary", "", "", "models/tiny/.1.json.01234567", None),
    ("temporary", "", "", f"leases/train/.{KEY}.01234567", None),
]

# Records and logs are no garbage.
KEPT = (
    "runs/nightly/config.json",
    "models/tiny/1.json",
    "logs/train/key/log.txt",
    "logs/train/key/.log.txt.01234567",
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore.open(str(tmp_path / "store"), create=True)
    for place in (*KEPT, *(file for _, _, _, file, _ in LEFT)):
        write(store.root / place)
    (store.root / "runs/.folder.01234567").mkdir()
    for name in (f"{KEY}.claim", KEY):
        write(store.root / "leases/train" / name)
    return store


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("seven b")
    # The file's time counts, not that of the folders that it was made in.
    for each in (path, *path.parents[:3]):
        os.utime(each, (WRITTEN, WRITTEN))


def test_each_thing_that_takes_room_is_told_of_once(store: LocalStore) -> None:
    artifact = compute(store).manifest
    found = list(store.held())
    for kind, stage, key, file, place in LEFT:
        path = store.root / (place or file)
        [held] = [each for each in found if each.place == (place or file)]
        times = [each.stat().st_mtime for each in (path, *path.rglob("*"))]
        assert held == Held(kind, stage, key, place or file, 7, max(times))
    [made] = [each for each in found if each.kind == "artifact"]
    folder = f"artifacts/writer/{artifact.key}"
    assert (made.stage, made.key, made.place) == ("writer", artifact.key, folder)
    files = [each for each in (store.root / folder).rglob("*") if each.is_file()]
    assert made.bytes == sum(each.stat().st_size for each in files)
    assert len(found) == len(LEFT) + 1


def test_a_lease_tells_the_whole_key_of_what_is_being_written(store: LocalStore) -> None:
    key = KEY[::-1]
    with store.lease("score", key) as lease:
        lease.acquire(waiting=pytest.fail)
        scratch = store.new_scratch("score", key)
        [held] = [each for each in store.held() if each.place.endswith(scratch.name)]
    assert (held.kind, held.stage, held.key) == ("scratch", "score", key)


def test_what_is_removed_is_gone_and_all_else_stays(store: LocalStore) -> None:
    artifact = compute(store)
    for gone in list(store.held()):
        before = {each.place for each in store.held()}
        store.remove(gone)
        assert {each.place for each in store.held()} == before - {gone.place}
        # Another collection may have been faster.
        store.remove(gone)
    assert not artifact.path.exists()
    assert not any((store.root / "artifacts/writer").iterdir())
    for place in KEPT:
        assert (store.root / place).exists(), place


def test_an_artifact_that_cannot_be_deleted_is_no_artifact_any_more(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = compute(store).manifest.key
    [held] = [each for each in store.held() if each.kind == "artifact"]

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.remove(held)
    assert list(store.artifacts()) == []
    write(store.root / "leases/writer" / key)
    scratch = [each for each in store.held() if (each.kind, each.key) == ("scratch", key)]
    assert [each.stage for each in scratch] == ["writer"]
    assert Path(scratch[0].place).name.startswith(f".scratch-{key[:16]}-")


def test_a_link_is_removed_and_not_what_it_leads_to(store: LocalStore, tmp_path: Path) -> None:
    write(tmp_path / "precious/letter")
    link = store.root / "quarantine/link"
    link.symlink_to(tmp_path / "precious")
    [held] = [each for each in store.held() if each.place == "quarantine/link"]
    store.remove(held)
    assert not link.is_symlink()
    assert (tmp_path / "precious/letter").exists()


def test_work_and_manifest_are_those_of_their_key(store: LocalStore) -> None:
    assert store.work_files("train", KEY) == {"step-1", "step-1/state"}
    assert store.work_files("train", "other") == frozenset()
    key = request(store).key
    assert store.manifest("writer", key) is None
    made = compute(store)
    assert store.manifest("writer", key) == made.manifest
    assert store.share(made.path) == str(made.path)
