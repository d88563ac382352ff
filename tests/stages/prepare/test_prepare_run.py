import json
import math
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.contract.digests import prompt_id
from stages.contract.errors import UserError
from stages.contract.request import FileInput
from stages.prepare.params import PrepareParams
from stages.prepare.run import STAGE
from stages.tables.schemas import PROMPTS, read_rows
from tests.stage_calls import call, file_input, metrics, write_jsonl


def chat(question, **more):
    return {"messages": [{"role": "user", "content": question}], **more}


def questions(count):
    return [chat(f"question {number}", reference_answer=str(number)) for number in range(count)]


def prepare(store, *sources, test=None, events=None, **params):
    settings = PrepareParams.model_validate({"test_prompts": 3} | params)
    inputs = {"train": sources} | ({"test": [test]} if test else {})
    return call(STAGE, settings, inputs, store, events=events)


def table(artifact, name):
    return list(read_rows(artifact.path / f"{name}.parquet", PROMPTS))


def text(row):
    return row["messages"][-1]["content"]


def test_every_prompt_arrives_once_with_its_reference_answer(store, tmp_path):
    artifact = prepare(store, write_jsonl(tmp_path / "p.jsonl", questions(20)))
    names = ["iteration-1", "iteration-2", "iteration-3", "test"]
    rows = [row for name in names for row in table(artifact, name)]
    assert sorted(text(row) for row in rows) == sorted(f"question {n}" for n in range(20))
    assert all(text(row) == f"question {row['reference_answer']}" for row in rows)
    assert all(row["prompt_id"] == prompt_id(row["messages"]) for row in rows)
    assert len(table(artifact, "test")) == 3


def test_metrics_count_what_was_left_out(store, tmp_path):
    answered = [{"role": "user", "content": "cut me"}, {"role": "assistant", "content": "gone"}]
    train = write_jsonl(
        tmp_path / "train.jsonl",
        [
            *questions(10),
            *questions(3),
            {**questions(1)[0], "reference_answer": "another"},
            {"messages": answered},
            {"messages": []},
        ],
    )
    test = write_jsonl(tmp_path / "test.jsonl", questions(2))
    artifact = prepare(
        store, train, test=test, iterations=2, invalid_rows="drop", prompts_per_iteration=3
    )
    assert metrics(artifact) == {
        "rows": 18,
        "invalid_rows": 1,
        "assistant_turns_cut": 1,
        "duplicates": 4,
        "other_reference_answers": 1,
        "overlap_with_test": 2,
    }
    other = prepare(
        *(store, train),
        test=write_jsonl(tmp_path / "test.jsonl", questions(12)),
        iterations=2,
        invalid_rows="drop",
        overlap="drop_from_test",
    )
    assert metrics(other)["overlap_with_test"] == 10
    assert len(table(other, "test")) == 2
    assert len(table(other, "iteration-1") + table(other, "iteration-2")) == 11


def test_reference_answers_keep_their_form(store, tmp_path):
    numbers = pa.table({"prompt": ["a", "b", "c"], "reference_answer": [56.0, 0.5, None]})
    pq.write_table(numbers, tmp_path / "numbers.parquet")
    rows = [chat("a", reference_answer="56"), chat("c"), chat("b", reference_answer="1/2")]
    source = tmp_path / "folder"
    source.mkdir()
    (tmp_path / "numbers.parquet").rename(source / "numbers.parquet")
    write_jsonl(source / "rows.jsonl", rows)
    artifact = prepare(store, source, test_prompts=1, iterations=1)
    rows = table(artifact, "iteration-1") + table(artifact, "test")
    assert {text(row): row["reference_answer"] for row in rows} == {
        "a": "56",
        "b": "0.5",
        "c": None,
    }


@pytest.mark.parametrize("character", "\0\r\v\f\x1e\x85\u2028\u2029")
def test_texts_keep_characters_that_separate_lines(store, tmp_path, character):
    rows = [chat(f"{number}{character}b", reference_answer=f"x{character}y") for number in "01"]
    # As other programs write them: only what JSON reserves is escaped.
    written = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "p.jsonl").write_bytes(written.encode())
    artifact = prepare(store, tmp_path / "p.jsonl", iterations=1, test_prompts=1)
    prepared = table(artifact, "iteration-1") + table(artifact, "test")
    assert sorted(text(row) for row in prepared) == [f"{number}{character}b" for number in "01"]
    assert {row["reference_answer"] for row in prepared} == {f"x{character}y"}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_with_a_picture_is_refused(store, tmp_path, suffix):
    rows = [{"prompt": name, "images": images} for name, images in (("a", []), ("b", ["b.png"]))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    write_jsonl(tmp_path / "p.jsonl", rows)
    with pytest.raises(UserError, match="2: the row holds images"):
        prepare(store, tmp_path / f"p.{suffix}", iterations=1, test_prompts=1)


def test_plain_text_becomes_a_user_message_under_the_system_prompt(store, tmp_path):
    chat = [{"role": "system", "content": "own"}, {"role": "user", "content": "chat"}]
    source = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "plain"}, {"messages": chat}])
    artifact = prepare(store, source, iterations=1, test_prompts=1, system_prompt="be brief")
    rows = table(artifact, "iteration-1") + table(artifact, "test")
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "plain"}]
    assert sorted((row["messages"] for row in rows), key=str) == [plain, chat]


@pytest.mark.parametrize("written", [list, json.dumps], ids=["list", "JSON"])
@pytest.mark.parametrize("columns", [{}, {"prompt": "the last turn"}], ids=["alone", "with-prompt"])
def test_the_prompt_of_a_preference_is_its_conversations(store, tmp_path, written, columns):
    answer = {"role": "assistant", "content": "yes"}
    rows = [
        {"chosen": written([*row["messages"], answer]), "rejected": "no", **columns}
        for row in questions(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    artifact = prepare(store, tmp_path / "p.parquet", iterations=1, test_prompts=1)
    prompts = table(artifact, "iteration-1") + table(artifact, "test")
    assert sorted(map(text, prompts)) == sorted(f"question {number}" for number in range(4))


def test_a_folder_of_files_is_one_source(store, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", questions(12)[:5])
    write_jsonl(folder / "b.jsonl", questions(12)[5:])
    (folder / "README.md").write_text("not prompts")
    before = file_input(folder)
    # Not in the folder's digest, so not in the artifact's key: macOS writes such files.
    write_jsonl(folder / ".c.jsonl", [chat("hidden")])
    (folder / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07")
    assert file_input(folder) == before
    artifact = prepare(store, folder)
    assert metrics(artifact)["rows"] == 12


# Each with a part of the message. Forms of messages are tested with stages.contract.messages.
BAD_ROWS = [
    ({"messages": [{"role": "system", "content": "s"}]}, "no user turn at its end"),
    (
        {"messages": [{"role": "user", "content": "u"}, {"role": "system", "content": "s"}]},
        "no user turn at its end",
    ),
    (chat(" \n"), "last user turn is empty"),
    ({"question": "?"}, r"'messages' or 'prompt' \(columns: question\)"),
    (chat("u", reference_answer=["a"]), "reference answer is list"),
    (chat("u", reference_answer=math.nan), "reference answer is nan"),
    ({"prompt": "\ud800"}, "lone surrogate"),
]


@pytest.mark.parametrize(("row", "word"), BAD_ROWS)
def test_a_bad_row_is_refused_with_its_place(store, tmp_path, row, word):
    source = write_jsonl(tmp_path / "p.jsonl", [*questions(1), row])
    with pytest.raises(UserError, match=f"{source}, line 2: .*{word}") as caught:
        prepare(store, source, iterations=1, test_prompts=1)
    assert caught.value.remedy
    assert list(store.artifacts()) == []


def test_bad_rows_can_be_dropped(store, tmp_path):
    rows = [*questions(2), *(row for row, _ in BAD_ROWS), *questions(4)]
    source = write_jsonl(tmp_path / "p.jsonl", rows)
    artifact = prepare(store, source, iterations=1, test_prompts=1, invalid_rows="drop")
    counts = metrics(artifact)
    assert (counts["invalid_rows"], counts["duplicates"]) == (len(BAD_ROWS), 2)
    assert len(table(artifact, "iteration-1")) == 3


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("bad.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2: not a line of JSON"),
        ("bad.jsonl", b"[1, 2]\n", "line 1: a list"),
        (
            "bad.jsonl",
            rb'{"prompt": "a", "reference_answer": "\ud83d"}',
            "line 1: column 'reference_answer' holds a lone surrogate",
        ),
        ("bad.jsonl", b"\n\n", "no prompts"),
        ("bad.parquet", b"no parquet", "not a Parquet file"),
        ("bad.csv", b"prompt\nhi\n", "no known kind"),
        ("folder/README.md", b"no prompts", "no data files"),
    ],
)
def test_a_bad_file_is_refused(store, tmp_path, name, content, word):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(UserError, match=word) as caught:
        prepare(store, tmp_path / Path(name).parts[0])
    assert caught.value.remedy


def test_a_missing_source_is_refused(store):
    with pytest.raises(UserError, match="no such file or folder"):
        prepare(store, FileInput(location="missing.jsonl", digest="0"))


COLUMNS = {"question": ["a", "b"], "answer": ["1", "2"], "reference_answer": ["1", "2"]}


@pytest.mark.parametrize(
    ("columns", "asked", "told"),
    [
        (COLUMNS, {}, r"row 1: no prompt in column.* \(columns: question, answer, reference_ans"),
        (
            COLUMNS,
            {"prompt_column": "question", "reference_columns": ("solution",)},
            r"no column 'solution'.* \(columns: question, answer, reference_ans",
        ),
        (
            {"prompt": ["a"], "asked": [datetime(2026, 1, 1)]},
            {"reference_columns": ["asked"]},
            r"row 1: `reference_columns`: .*datetime",
        ),
    ],
    ids=["not-read", "no-such-column", "no-json"],
)
def test_an_error_on_a_missing_column_lists_the_columns(store, tmp_path, columns, asked, told):
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    with pytest.raises(UserError, match=told):
        prepare(store, tmp_path / "p.parquet", **asked)
