"""All that takes room in a store's folder, and its removal."""

import shutil

import pytest

from stages.store.usage import StoreEntry
from tests.stages.contract.writer_stage import compute

KEY = "0123456789abcdef" * 4

# Kind, stage, key, file that holds the room, place of the entry.
LEFT = [
    ("work", "train", KEY, f"work/train/{KEY}/step-1/state", f"work/train/{KEY}"),
    (
        "scratch",
        "train",
        KEY,
        f"artifacts/train/.scratch-{KEY}-01234567/checkpoint/weights",
        f"artifacts/train/.scratch-{KEY}-01234567",
    ),
    ("aside", "", "", "quarantine/pair-0123-now/pairs.parquet", "quarantine/pair-0123-now"),
]

# Records and logs are kept.
KEPT = (
    "runs/nightly/config.json",
    "models/tiny.json",
    "logs/train/key/log.txt",
    "logs/train/key/.log.txt.01234567",
)


@pytest.fixture
def store(store):
    for place in (*KEPT, *(file for _, _, _, file, _ in LEFT)):
        write(store.root / place)
    for name in (f"{KEY}.claim", KEY):
        write(store.root / "leases/train" / name)
    return store


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("seven b")


def test_a_folder_that_goes_during_the_look_does_not_end_it(store):
    folders = {f"artifacts/train/.scratch-{KEY}-{end}" for end in ("01234567", "other")}
    for folder in folders:
        write(store.root / folder / "checkpoint/weights")
    for name, _, _ in store.contents("artifacts"):
        for folder in folders:
            if name == f"{folder}/checkpoint":
                # The one that the look has not come to.
                shutil.rmtree(store.root / (folders - {folder}).pop(), ignore_errors=True)


def test_each_thing_that_takes_room_is_listed_once(store):
    artifact = compute(store).manifest
    entries = list(store.entries())
    for kind, stage, key, _, place in LEFT:
        assert [held for held in entries if held.place == place] == [
            StoreEntry(kind, stage, key, place, 7)
        ]
    [entry] = [held for held in entries if held.kind == "artifact"]
    folder = f"artifacts/writer/{artifact.key}"
    assert (entry.stage, entry.key, entry.place) == ("writer", artifact.key, folder)
    files = [path for path in (store.root / folder).rglob("*") if path.is_file()]
    assert entry.bytes == sum(file.stat().st_size for file in files)
    assert len(entries) == len(LEFT) + 1


def test_what_is_removed_is_gone_and_all_else_stays(store):
    artifact = compute(store)
    for gone in list(store.entries()):
        before = {entry.place for entry in store.entries()}
        store.remove(gone)
        assert {entry.place for entry in store.entries()} == before - {gone.place}
        # Another collection may have been faster.
        store.remove(gone)
    assert not artifact.path.exists()
    assert not any((store.root / "artifacts/writer").iterdir())
    for place in KEPT:
        assert (store.root / place).exists(), place
