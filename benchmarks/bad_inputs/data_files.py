"""Damaged files of prompts, of supervised data and of oracles."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bad_inputs.small_run import PROMPTS
from benchmarks.bad_inputs.trial import Case
from stages.contract.errors import EXIT_FAILED, EXIT_USER

Write = Callable[[Path], object]
"""Makes a file, or something else in its place."""
_BAD_LINE = 9
_MEGABYTES = 20 << 20


@dataclass(frozen=True)
class Bad:
    """A file for one of a run's inputs.

    Attributes:
        file: Its name.
        content: Its content, or a function that makes it.
        says: Texts that the message must have besides the file's name.
        by: See :class:`benchmarks.bad_inputs.trial.Case`.
        why: Why it is right to accept it.
        names_file: False if the place is a setting, which the message names.
        code: Exit code of the refusal.
    """

    file: str
    content: bytes | Write
    says: tuple[str, ...] = ()
    by: Literal["itself", "run"] | None = "run"
    why: str = ""
    names_file: bool = True
    code: int = EXIT_USER


def _line(content: str | bytes, *says: str, **more: Any) -> Bad:
    """Good prompts, of which one line in the middle is replaced."""
    rows = [json.dumps({"prompt": text}).encode() for text in PROMPTS]
    rows[_BAD_LINE - 1] = content if isinstance(content, bytes) else content.encode()
    return Bad("bad.jsonl", b"\n".join(rows), (f"line {_BAD_LINE}", *says), **more)


def _row(*says: str, **columns: Any) -> Bad:
    return _line(json.dumps(columns), *says)


def _turns(*roles: str, content: Any = "red") -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role in roles]


def _all(*rows: Any, **more: Any) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def _table(**columns: Any) -> Write:
    return lambda path: pq.write_table(pa.table(columns), path)


def _parquet(change: Callable[[bytes], bytes]) -> Write:
    """A good Parquet file, of which the bytes are changed."""

    def write(path: Path) -> None:
        pq.write_table(
            pa.table({"prompt": PROMPTS}), path, use_dictionary=False, compression="snappy"
        )
        path.write_bytes(change(path.read_bytes()))

    return write


def _link(target: str) -> Write:
    return lambda path: path.symlink_to(target)


def _folder(**files: bytes | Write) -> Write:
    def write(path: Path) -> None:
        path.mkdir()
        for name, content in files.items():
            put(path / name.replace("_", "."), content)

    return write


def put(path: Path, content: bytes | Write) -> None:
    """Writes a file, or has it made."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)


_GOOD = "".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS).encode()
_NO_UTF8 = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
)
_COMMON: dict[str, Bad] = {
    "a folder": Bad("bad.jsonl", _folder(), ("empty folder",), by="itself"),
    "a FIFO": Bad("bad.jsonl", os.mkfifo, ("neither a file nor a folder",), by="itself"),
    "a link to itself": Bad("bad.jsonl", _link("bad.jsonl"), by="itself"),
    "a link to nothing": Bad("bad.jsonl", _link("nothing"), by="itself"),
    "a device": Bad("bad.jsonl", _link("/dev/zero"), ("neither",), by="itself"),
    "cannot be read": Bad("bad.jsonl", _link("/proc/self/mem"), by="itself", code=EXIT_FAILED),
    "a name that is too long": Bad("a" * 300 + ".jsonl", lambda path: None, by="itself"),
    "of another kind": Bad("bad.csv", b"prompt\nred\n", (".jsonl",), by="run"),
    "compressed": Bad("bad.jsonl.gz", b"\x1f\x8b", (".jsonl",)),
    "compressed, by another name": Bad(
        "bad.jsonl", b"\x1f\x8b\x08\0\0\0", ("line 1",), by="itself"
    ),
    "empty": Bad("bad.jsonl", b"", ("bad.jsonl",)),
    "blank lines": Bad("bad.jsonl", b"\n \n\n", ()),
    "UTF-16": Bad("bad.jsonl", _GOOD.decode().encode("utf-16"), ("line 1",), by="itself"),
    "UTF-16 without a mark": Bad(
        "bad.jsonl", _GOOD.decode().encode("utf-16-le"), ("line 1",), by="itself"
    ),
    # The good file's own bytes would be found in the store, where their content counts.
    "Parquet that is JSON lines": Bad(
        "bad.parquet", _GOOD + b"\n", ("not a Parquet file",), by="itself"
    ),
    "Parquet that is empty": Bad("bad.parquet", b"", ("not a Parquet file",), by="itself"),
    "Parquet cut in half": Bad(
        "bad.parquet",
        _parquet(lambda data: data[: len(data) // 2]),
        ("not a Parquet file",),
        by="itself",
    ),
    "Parquet of magic numbers": Bad("bad.parquet", b"PAR1" * 3, by="itself"),
    "Parquet with a garbled footer": Bad(
        "bad.parquet", _parquet(lambda data: data[:-60] + b"\xff" * 40 + data[-20:]), by="itself"
    ),
    "Parquet with garbled pages": Bad(
        "bad.parquet", _parquet(lambda data: data[:4] + b"\xff" * 60 + data[64:]), by="itself"
    ),
    "Parquet with garbled values": Bad(
        "bad.parquet",
        _parquet(lambda data: data[:40] + bytes(byte ^ 255 for byte in data[40:90]) + data[90:]),
        by="itself",
    ),
    "Parquet with texts that are not UTF-8": Bad(
        "bad.parquet", _table(prompt=_NO_UTF8), by="itself"
    ),
}
_PROMPTS: dict[str, Bad] = {
    "not UTF-8": _line(b'{"prompt": "r\xffd"}'),
    "a NUL byte": _line(b'{"prompt": "r\0d"}'),
    "half a line": _line('{"prompt": "red'),
    "two rows on a line": _line('{"prompt": "red"} {"prompt": "blue"}'),
    "Python's form": _line("{'prompt': 'red'}"),
    "a list": _line("[]", "list"),
    "a number": _line("3", "int"),
    "null": _line("null", "NoneType"),
    "deeply nested": _line("[" * 100_000),
    "a number of 5,000 digits": _line('{"prompt": "red", "reference_answer": ' + "9" * 5000 + "}"),
    "no prompt": _row("'messages'", "'prompt'", "text", text="red"),
    "no columns": _row("none"),
    "a prompt of a number": _row("'prompt'", "int", prompt=3),
    "an empty prompt": _row("empty", prompt=""),
    "a prompt of blanks": _row("empty", prompt=" \n\t"),
    "an empty conversation": _row("without messages", messages=[]),
    "a conversation of texts": _row("'messages'", "red", messages=["red"]),
    "a conversation in an object": _row("'messages'", "dict", messages={"role": "user"}),
    "an unknown role": _row("tool", messages=_turns("tool")),
    "no role": _row("'messages'", messages=[{"content": "red"}]),
    "content of a number": _row("'messages'", "3", messages=_turns("user", content=3)),
    "content of parts": _row(
        "'messages'", messages=_turns("user", content=[{"type": "text", "text": "red"}])
    ),
    "no user turn": _row("no user turn", messages=_turns("system")),
    "the assistant alone": _row("no user turn", messages=_turns("assistant")),
    "a system turn at the end": _row("no user turn", messages=_turns("user", "system")),
    "an empty last turn": _row("empty", messages=_turns("user", content="")),
    "half a surrogate": _line('{"prompt": "r\\ud800d"}', "\\ud800"),
    "half a surrogate as a role": _line(
        '{"messages": [{"role": "\\ud800", "content": "red"}]}', "\\ud800"
    ),
    "an answer that is not a number": _line('{"prompt": "red", "reference_answer": NaN}', "nan"),
    "an answer of another form": _row("reference", prompt="red", reference_answer={"a": 1}),
    "escape sequences": _line('{"messages": [{"role": "\\u001b[2J", "content": "red"}]}', "role"),
    "a column with a name of megabytes": _line(json.dumps({"x" * _MEGABYTES: 1}), "columns"),
    "a role of megabytes": _row("role", messages=_turns("x" * _MEGABYTES)),
    "thousands of columns": _row("columns", **{f"column{number}": 1 for number in range(9000)}),
    "megabytes of no JSON": _line("x" * _MEGABYTES),
    "a conversation that ends with the assistant": _line(
        json.dumps({"messages": _turns("user", "assistant")}),
        by=None,
        why="the answer is cut off, and counted in a message: supervised data serve as prompts",
    ),
    "the same key twice": _line(
        '{"prompt": "red", "prompt": "blue"}',
        by=None,
        why="as every reader of JSON does, the last one counts",
    ),
    "lines that end with CR LF": Bad(
        "bad.jsonl", _GOOD.replace(b"\n", b"\r\n"), by=None, why="white space"
    ),
    "a byte order mark": Bad(
        "bad.jsonl", b"\xef\xbb\xbf" + _GOOD, by=None, why="the JSON after it is read"
    ),
    "a prompt of megabytes": _line(
        json.dumps({"prompt": "red " * (1 << 20)}),
        by=None,
        why="it is longer than the policy's context: dropped, and counted in a message",
    ),
    "JSON that is cut": Bad("bad.json", b'[{"prompt": "red"}', ("no JSON",), by="itself"),
    "JSON of an object": Bad("bad.json", b'{"prompt": "red"}', ("array",), by="itself"),
    "JSON of texts": Bad("bad.json", b'["red"]', ("item 1",), by="itself"),
    "JSON that is empty": Bad("bad.json", b"[]", ("0 distinct",)),
    "JSON that is nested deeply": Bad("bad.json", b"[" * 100_000, by="itself"),
    "a folder without data": Bad("bad", _folder(a_txt=b"red"), (".jsonl",)),
    "a folder with a damaged file": Bad(
        "bad", _folder(a_jsonl=_GOOD, b_jsonl=b"{"), ("b.jsonl, line 1",)
    ),
    "a folder with a FIFO": Bad(
        "bad",
        _folder(a_jsonl=_GOOD, b_jsonl=os.mkfifo),
        by=None,
        why="other things in a folder are not read",
    ),
    "a folder with a link to itself": Bad(
        "bad", _folder(a_jsonl=_GOOD, b_jsonl=_link("b.jsonl")), by="itself"
    ),
    "Parquet of other columns": Bad("bad.parquet", _table(text=["red"]), ("'prompt'", "text")),
    "Parquet of numbers": Bad("bad.parquet", _table(prompt=[1, 2]), ("row 1", "int")),
    "Parquet of bytes": Bad("bad.parquet", _table(prompt=[b"red"]), ("row 1", "bytes")),
    "Parquet with nulls": Bad("bad.parquet", _table(prompt=["red", None]), ("row 2",)),
    "Parquet without rows": Bad(
        "bad.parquet", _table(prompt=pa.array([], pa.string())), ("0 distinct",)
    ),
    "Parquet without columns": Bad("bad.parquet", _table(), ("0 distinct",)),
    "Parquet with a date as answer": Bad(
        "bad.parquet",
        _table(prompt=PROMPTS, reference_answer=pa.array([0] * 16, pa.date32())),
        ("row 1",),
    ),
    "Parquet with two columns of a name": Bad(
        "bad.parquet",
        lambda path: pq.write_table(
            pa.Table.from_arrays([pa.array(PROMPTS)] * 2, ["prompt"] * 2), path
        ),
        by=None,
        why="as with a key that JSON has twice, the last one counts",
    ),
    "one prompt many times": Bad(
        "bad.jsonl",
        b'{"prompt": "red"}\n' * 16,
        ("1 distinct prompts", "test_prompts"),
        names_file=False,
    ),
    "fewer prompts than are held out": Bad(
        "bad.jsonl",
        _all({"prompt": "red"}, {"prompt": "blue"}),
        ("test_prompts is 4", "has 2 distinct"),
        names_file=False,
    ),
    "as many prompts as are held out": Bad(
        "bad.jsonl",
        _all(*({"prompt": text} for text in PROMPTS[:4])),
        ("test_prompts is 4",),
        names_file=False,
    ),
}
_HELD_OUT: dict[str, Bad] = {
    "half a line": _PROMPTS["half a line"],
    "not UTF-8": _PROMPTS["not UTF-8"],
    "an empty prompt": _PROMPTS["an empty prompt"],
    "empty": _COMMON["empty"],
    "a folder": _COMMON["a folder"],
    "a FIFO": _COMMON["a FIFO"],
    "deeply nested": _PROMPTS["deeply nested"],
    "Parquet of other columns": _PROMPTS["Parquet of other columns"],
    "Parquet with garbled pages": replace(_COMMON["Parquet with garbled pages"], by="run"),
    "all prompts of the training": Bad(
        "bad.jsonl", _GOOD, ("no prompts are left", "test_prompts"), names_file=False
    ),
}
_DIALOGUE = {"messages": _turns("user", "assistant")}


def _second(*says: str, **columns: Any) -> Bad:
    """Supervised data whose second line is bad."""
    return Bad("bad.jsonl", _all(_DIALOGUE, columns), ("line 2", *says))


_SUPERVISED: dict[str, Bad] = {
    "half a line": Bad("bad.jsonl", _all(_DIALOGUE) + b'\n{"mess', ("line 2",)),
    "not UTF-8": Bad("bad.jsonl", _all(_DIALOGUE) + b'\n{"prompt": "\xff"}', ("line 2",)),
    "deeply nested": Bad("bad.jsonl", _all(_DIALOGUE) + b"\n" + b"[" * 100_000, ("line 2",)),
    "a list": Bad("bad.jsonl", _all(_DIALOGUE, []), ("line 2", "list")),
    "no answer": _second("does not end with an assistant turn", messages=_turns("user")),
    "an empty answer": _second(
        "says something", messages=[*_turns("user"), *_turns("assistant", content=" ")]
    ),
    "no user turn": _second("no user turn", messages=_turns("assistant")),
    "no turns": _second("'messages'", messages=[]),
    "other columns": _second("columns: text", text="red"),
    "an answer of a number": _second("'response'", prompt="red", response=3),
    "a conversation of texts": _second("'messages'", messages=["red"]),
    "an unknown role": Bad(
        "bad.jsonl",
        _all(_DIALOGUE, {"messages": _turns("tool", "user", "assistant")}),
        ("line 2", "tool"),
    ),
    "half a surrogate": Bad(
        "bad.jsonl",
        _all(_DIALOGUE) + b'\n{"prompt": "red", "response": "\\ud800"}',
        ("line 2", "\\ud800"),
    ),
    "conversations beyond the context": Bad(
        "bad.jsonl",
        _all({"messages": _turns("user", "assistant", content="red blue " * 90)}),
        ("max_length_tokens",),
        names_file=False,
    ),
    "JSON in one piece": Bad("bad.json", b"[]"),
    "Parquet of other columns": Bad(
        "bad.parquet", _table(text=["red"]), ("row 1", "columns: text")
    ),
    "Parquet of numbers": Bad("bad.parquet", _table(prompt=[1], response=[2]), ("row 1",)),
    "Parquet without rows": Bad(
        "bad.parquet", _table(prompt=pa.array([], pa.string())), ("no conversations",)
    ),
    "a name that is known twice": Bad(
        "bad.jsonl",
        b'{"prompt": "red", "prompt": "one", "response": "blue"}',
        by=None,
        why="as every reader of JSON does, the last one counts",
    ),
}
_ORACLE_FILES: dict[str, Bad] = {
    "a folder": Bad("bad.py", _folder(a_py=b""), by="itself"),
    "an empty folder": Bad("bad.py", _folder(), ("empty folder",), by="itself"),
    "a FIFO": Bad("bad.py", os.mkfifo, ("neither",), by="itself"),
    "a link to itself": Bad("bad.py", _link("bad.py"), by="itself"),
    "cannot be read": Bad("bad.py", _link("/proc/self/mem"), by="itself", code=EXIT_FAILED),
    "NUL bytes": Bad("bad.py", b"\0\0", by="itself"),
    "not UTF-8": Bad("bad.py", b"x = '\xff'\n", by="itself"),
    "UTF-16": Bad("bad.py", "score = 3".encode("utf-16"), by="itself"),
    "a notebook": Bad("bad.ipynb", b'{"cells": []}', by="itself"),
    "a table": Bad("bad.parquet", _table(score=[1.0]), by="itself"),
    "deeply nested": Bad("bad.py", b"(" * 10_000, by="itself"),
    "recursion without end": Bad(
        "bad.py",
        b"def score(p, r, a):\n    return score(p, r, a)",
        ("RecursionError", "line 2"),
        by="itself",
    ),
    "waits for an answer": Bad(
        "bad.py",
        b"def score(p, r, a):\n    return [float(input())] * len(r)",
        ("EOFError", "line 2"),
        by="itself",
    ),
    "scores of no prompt but the first two": Bad(
        "bad.py",
        b"def score(p, r, a):\n    return [1 / (len(r) < 8)] * len(r)",
        ("ZeroDivisionError", "line 2"),
    ),
}


def cases(folder: Path, config: Path) -> Iterator[Case]:
    """All cases; the files are written to a folder.

    Args:
        folder: An empty folder.
        config: Configuration of a run with good inputs.
    """
    supervised = "--set=inputs.policy=null"
    groups: list[tuple[str, str, tuple[str, ...], dict[str, Bad]]] = [
        ("prompts", "prompts", ("--set=inputs.prompts=[FILE]",), _COMMON | _PROMPTS),
        ("held-out prompts", "held out", ("--set=inputs.test_prompts=FILE",), _HELD_OUT),
        (
            "supervised data",
            "sft",
            (supervised, "--set=inputs.warm_start=FILE"),
            _COMMON | _SUPERVISED,
        ),
        ("oracle files", "oracle", ("--set=inputs.oracle_code=FILE",), _ORACLE_FILES),
    ]
    for kind, short, settings, table in groups:
        for number, (name, bad) in enumerate(table.items()):
            place = folder / f"{short.replace(' ', '-')}-{number}" / bad.file
            place.parent.mkdir()
            put(place, bad.content)
            given = [setting.replace("FILE", str(place)) for setting in settings]
            says = (place.name, *bad.says) if bad.by and bad.names_file else bad.says
            arguments = ["plan", str(config), *given]
            yield Case(kind, name, arguments, says, bad.by, bad.why, bad.code)
