"""Files of a job that shares no folder with its orchestrator."""

from pathlib import Path

from stages.harness.job_files import JobFiles
from tests.object_storage import objects


def test_what_a_job_writes_arrives_once_and_its_end_last(url: str, tmp_path: Path) -> None:
    there, here = (tmp_path / name for name in ("there", "here"))
    for each in (there, here):
        each.mkdir()
    orchestrator = JobFiles(url, here)
    orchestrator.want()
    (there / "events").write_text("one\n")
    assert not JobFiles(url, there).exchange()
    orchestrator.receive()
    assert (here / "events").read_text() == "one\n"
    # It is killed while it writes the piece, and another one goes on.
    (here / "events").write_text("o")
    orchestrator = JobFiles(url, here)
    orchestrator.receive()
    (there / "events").write_text("one\ntwo\n")
    (there / "status").write_text("{}")
    # It does not know that the first line was sent: the answer got lost.
    assert JobFiles(url, there).exchange()
    assert not (there / "stop").exists()
    orchestrator.receive()
    assert (here / "events").read_text() == "one\ntwo\n"
    assert (here / "status").read_text() == "{}"
    orchestrator.remove()
    assert objects(url) == {}
    JobFiles(url, there).exchange()
    assert (there / "stop").exists(), "nobody wants the job any more"
