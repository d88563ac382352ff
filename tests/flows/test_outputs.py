"""Responses in the formats of other evaluations."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from flows.report.outputs import Outputs, export, parse_export
from stages.contract.errors import UserError
from tests.small_disk import no_room
from tests.stage_calls import response, write_scored

CONVERSATION = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture
def outputs(tmp_path: Path) -> Outputs:
    """Two shards: a prompt with two samples, and one with a sample without a score."""
    first = [
        (response("What is 6 · 7?", 0, "42", reference_answer="42"), 1.0),
        (response("What is 6 · 7?", 1, "Ça fait 41.", reference_answer="42"), 0.0),
    ]
    second = [(response("Sing.", 0, "La."), None)]
    shards = [write_scored(tmp_path, first, "0-"), write_scored(tmp_path, second, "1-")]
    responses, scores = zip(*shards, strict=True)
    return Outputs("mine:3", "sums", responses, scores)


def written(tmp_path: Path, name: str, outputs: Outputs) -> str:
    export(name, tmp_path / "new/file", outputs)
    return (tmp_path / "new/file").read_text()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_alpaca_eval_has_one_output_for_each_instruction(tmp_path: Path, outputs: Outputs) -> None:
    rows = json.loads(written(tmp_path, "alpaca_eval", outputs))
    assert [(row["instruction"], row["output"]) for row in rows] == [
        ("What is 6 · 7?", "42"),
        ("Sing.", "La."),
    ]
    assert {row["generator"] for row in rows} == {"mine:3"}
    assert {row["dataset"] for row in rows} == {"sums"}


def test_arena_hard_has_the_ids_of_its_questions(tmp_path: Path, outputs: Outputs) -> None:
    questions = tmp_path / "question.jsonl"
    known = [{"uid": "u1", "prompt": "Sing."}, {"uid": "u2", "prompt": "What is 6 · 7?"}]
    questions.write_text("".join(json.dumps(each) + "\n" for each in known))
    asked = Outputs("mine:3", "arena", outputs.responses, outputs.scores, questions)
    rows = lines(written(tmp_path, "arena_hard", asked))
    assert [row["uid"] for row in rows] == ["u2", "u1"]
    assert rows[0]["messages"] == [
        {"role": "user", "content": "What is 6 · 7?"},
        {"role": "assistant", "content": {"answer": "42"}},
    ]
    assert len({row["ans_id"] for row in rows}) == 2
    questions.write_text(json.dumps(known[0]) + "\n")
    with pytest.raises(UserError, match=r"'What is 6 · 7\?' is not in"):
        export("arena_hard", tmp_path / "file", asked)


def test_lm_eval_has_all_samples_and_their_mean_score(tmp_path: Path, outputs: Outputs) -> None:
    first, second = lines(written(tmp_path, "lm_eval", outputs))
    assert (first["doc_id"], first["target"], first["score"]) == (0, "42", 0.5)
    assert first["resps"] == [["42", "Ça fait 41."]]
    assert first["target_hash"] == hashlib.sha256(b"42").hexdigest()
    assert json.loads(first["arguments"]["gen_args_0"]["arg_0"]) == first["doc"]["messages"]
    assert second["score"] is None
    assert second["doc"]["reference_answer"] is None


def test_a_conversation_fits_lm_eval_only(tmp_path: Path) -> None:
    row = response("", 0, "Now.") | {"messages": CONVERSATION}
    responses, scores = write_scored(tmp_path, [(row, 1.0)], "")
    outputs = Outputs("mine", "chat", [responses], [scores])
    with pytest.raises(UserError, match="a conversation of 3 turns"):
        export("alpaca_eval", tmp_path / "file", outputs)
    assert not (tmp_path / "file").exists()
    assert lines(written(tmp_path, "lm_eval", outputs))[0]["resps"] == [["Now."]]


@pytest.mark.parametrize("text", ["alpaca_eval", "alpaca_eval=", "csv=file"])
def test_a_wrong_export_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="formats: alpaca_eval, arena_hard, lm_eval"):
        parse_export(text, None)


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, why in (("", "is a folder"), ("file/answers.json", "file is no folder")):
        with pytest.raises(UserError, match=why):
            parse_export(f"lm_eval={tmp_path / place}", None)
    assert parse_export(f"lm_eval={tmp_path / 'new/file'}", None)[1] == tmp_path / "new/file"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("questions", [None, Path("/nowhere/question.jsonl")])
def test_arena_hard_s_questions_are_asked_for_before_anything_runs(questions: Path | None) -> None:
    with pytest.raises(UserError) as caught:
        parse_export("arena_hard=answers.jsonl", questions)
    assert "add --questions" in caught.value.remedy


def test_questions_that_are_not_arena_hard_s_are_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    questions = tmp_path / "question.jsonl"
    questions.write_text('{"question_id": "1", "turns": []}\n')
    with pytest.raises(UserError, match="line 1: a question has no prompt and no uid"):
        parse_export("arena_hard=answers.jsonl", questions)


def test_a_disk_without_room_leaves_the_file_of_before(tmp_path: Path, outputs: Outputs) -> None:
    before = written(tmp_path, "alpaca_eval", outputs)
    with pytest.raises(OSError), no_room():
        export("lm_eval", tmp_path / "new/file", outputs)
    assert (tmp_path / "new/file").read_text() == before
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["file"]


def test_a_link_and_a_pipe_are_written_to(tmp_path: Path, outputs: Outputs) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "elsewhere")
    export("lm_eval", link, outputs)
    assert link.is_symlink()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(reader, "rb") as file:
        export("lm_eval", pipe, outputs)
        assert file.read() == (tmp_path / "elsewhere").read_bytes()
