"""Garbage collection while runs are at work: all that they need stays."""

import json
import os
from typing import ClassVar

from typer.testing import CliRunner

from flows.commands.cli import app
from flows.commands.store import Garbage, collect_garbage, remove_garbage
from flows.execution.run_record import RunRecord
from stages.contract.params import StageParams
from stages.harness.program import Stage
from stages.store.base import Store
from stages.store.usage import StoreEntry
from tests.flows.records import recorded
from tests.stage_calls import call


class NoteParams(StageParams):
    """A stage for these tests: writes a note."""

    stage: ClassVar[str] = "note"
    version: ClassVar[str] = "1"

    text: str = "content"


NOTE = Stage(NoteParams, lambda ctx: (ctx.out / "note.txt").write_text(ctx.params.text))


def made(store, text):
    return call(NOTE, NoteParams(text=text), {}, store)


def needs(store, artifact, run="nightly"):
    """Writes down that a run uses an artifact."""
    key = artifact.manifest.key
    recorded(RunRecord(store, run), key[:8], stage="note", key=key, state="reused")


def test_what_a_run_comes_to_need_after_the_look_stays(store):
    first, second, third = (made(store, text) for text in ("one", "two", "three"))
    needs(store, first)
    garbage = collect_garbage(store)
    assert {item.entry.key for item in garbage} == {second.manifest.key, third.manifest.key}
    needs(store, second)
    assert [item.entry.key for item in remove_garbage(store, garbage)] == [third.manifest.key]
    assert set(store.artifacts()) == {("note", one.manifest.key) for one in (first, second)}
    assert collect_garbage(store) == []


def test_what_has_become_an_artifact_since_the_look_stays(store):
    artifact = made(store, "one")
    key = artifact.manifest.key
    needs(store, artifact)
    left = StoreEntry("scratch", "note", key, f"artifacts/note/{key}", 1)
    assert remove_garbage(store, [Garbage(left, "left by an attempt")]) == []
    assert set(store.artifacts()) == {("note", key)}


def test_what_is_published_during_the_look_stays(store, monkeypatch):
    look = Store.contents

    def look_late(store, folder):
        needs(store, made(store, "one"))
        return look(store, folder)

    monkeypatch.setattr(Store, "contents", look_late)
    assert collect_garbage(store) == []


def test_what_a_run_comes_to_need_during_the_removal_stays(store, monkeypatch):
    artifacts = [made(store, text) for text in "012"]
    remove_one = Store.remove

    def remove_beside_a_run(store, gone):
        remove_one(store, gone)
        if left := [artifact for artifact in artifacts if artifact.path.exists()]:
            needs(store, left[-1])

    monkeypatch.setattr(Store, "remove", remove_beside_a_run)
    assert len(remove_garbage(store, collect_garbage(store))) < len(artifacts)


def test_what_is_computed_after_the_look_stays(store):
    artifact = made(store, "one")
    garbage = collect_garbage(store)
    with store.lease("note", artifact.manifest.key) as lease:
        lease.acquire()
        assert remove_garbage(store, garbage) == []
    assert len(remove_garbage(store, garbage)) == 1


def test_plain_files_and_links_among_the_artifacts_do_not_end_it(store, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "letter.txt").write_text("dear")
    artifact = made(store, "one")
    needs(store, artifact)
    folder = artifact.path.parent
    (folder / "file").write_text("12345")
    (folder / "link").symlink_to(precious)
    (folder / "loop").symlink_to(folder / "loop")
    sizes = {garbage.entry.key: garbage.entry.bytes for garbage in collect_garbage(store)}
    assert sizes == {"file": 5, "link": 0, "loop": 0}
    remove_garbage(store, collect_garbage(store))
    assert sorted(path.name for path in folder.iterdir()) == [artifact.manifest.key]
    assert json.loads((artifact.path / "manifest.json").read_text())["stage"] == "note"
    assert (precious / "letter.txt").read_text() == "dear"


def test_names_in_brackets_are_shown_as_they_are(tmp_path):
    store = Store.in_folder(str(tmp_path / "[/old]" / "store"), create=True)
    artifact = made(store, "content")
    artifact.file("note.txt").chmod(0o644)
    artifact.file("note.txt").write_text("changed")
    verified = CliRunner().invoke(app, ["verify", "--store", str(store.root)])
    assert verified.exit_code == 1
    assert "[/old]" in verified.output


def test_the_folder_of_a_job_goes_some_time_after_its_end(store):
    jobs = store.root / "slurm/jobs"
    for name in ("over", "just-over", "at-work"):
        (jobs / name).mkdir(parents=True)
        (jobs / name / "log").write_text("text")
        os.utime(jobs / name / "log", (0, 0))
    for name in ("over", "just-over"):
        (jobs / name / "status").write_text("{}")
    os.utime(jobs / "over/status", (0, 0))
    garbage = collect_garbage(store)
    assert [(item.entry.place, item.entry.bytes) for item in garbage] == [("slurm/jobs/over", 6)]
    remove_garbage(store, garbage)
    assert sorted(path.name for path in jobs.iterdir()) == ["at-work", "just-over"]
