"""Responses in the format of AlpacaEval."""

import json
import os
from pathlib import Path

import pytest

from flows.report.files import export, parse_export
from stages.contract.errors import UserError
from tests.small_disk import no_room
from tests.stage_calls import response, write_scored


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two shards: a prompt with two samples, and one with a sample without a score."""
    first = [
        (response("What is 6 · 7?", 0, "42", reference_answer="42"), 1.0),
        (response("What is 6 · 7?", 1, "Ça fait 41.", reference_answer="42"), 0.0),
    ]
    second = [(response("Sing.", 0, "La."), None)]
    written = [write_scored(tmp_path, first, "0-"), write_scored(tmp_path, second, "1-")]
    return [responses for responses, _ in written]


def test_there_is_one_output_for_each_instruction(tmp_path: Path, shards: list[Path]) -> None:
    path = parse_export(f"alpaca_eval={tmp_path / 'new/file'}")
    export(path, "mine:3", "sums", shards)
    rows = json.loads(path.read_text())
    assert [(row["instruction"], row["output"]) for row in rows] == [
        ("What is 6 · 7?", "42"),
        ("Sing.", "La."),
    ]
    assert {row["generator"] for row in rows} == {"mine:3"}
    assert {row["dataset"] for row in rows} == {"sums"}


def test_a_conversation_does_not_fit(tmp_path: Path) -> None:
    turns = [("user", "Hello."), ("assistant", "Hi."), ("user", "And now?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    row = response("", 0, "Now.") | {"messages": messages}
    responses, _ = write_scored(tmp_path, [(row, 1.0)], "")
    with pytest.raises(UserError, match="a conversation of 3 turns"):
        export(tmp_path / "file", "mine", "chat", [responses])
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("text", ["alpaca_eval", "alpaca_eval=", "csv=file"])
def test_a_wrong_export_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="formats: alpaca_eval"):
        parse_export(text)


def test_a_disk_without_room_leaves_the_file_of_before(tmp_path: Path, shards: list[Path]) -> None:
    path = tmp_path / "new/file"
    export(path, "mine", "sums", shards)
    before = path.read_text()
    with pytest.raises(OSError), no_room():
        export(path, "other", "sums", shards)
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_link_and_a_pipe_are_written_to(tmp_path: Path, shards: list[Path]) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "elsewhere")
    export(link, "mine", "sums", shards)
    assert link.is_symlink()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(reader, "rb") as file:
        export(pipe, "mine", "sums", shards)
        assert file.read() == (tmp_path / "elsewhere").read_bytes()
