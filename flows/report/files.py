"""Files that a person reads or hands on: pages, JSON, responses in AlpacaEval's format."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from stages.contract.atomic import explain_disk_errors, write_atomically
from stages.contract.errors import UserError
from stages.tables.schemas import RESPONSES, read_rows

_TEMPLATES = ("flows.report", "templates")
_FORMAT = "alpaca_eval"
_COLUMNS = ("prompt_id", "sample_index", "messages", "response")


def write_file(path: Path, content: str | bytes) -> Path:
    """Writes a file, and its folder, and returns its path.

    A reader sees the file before or the file after. A link stays, and what it leads to is written.
    Special files such as `/dev/stdout` are written directly.

    Raises:
        UserError: The disk is full, or the place cannot be written.
    """
    if path.exists() and not path.is_file():
        with explain_disk_errors(path):
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        write_atomically(Path(os.path.realpath(path)), content)
    return path


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Refuses a folder that holds something; if the block fails, the folder is as it was.

    Raises:
        UserError: A file has that name, the folder is not empty, or the disk is full.
    """
    was_there = folder.exists()
    if was_there and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there and not empty", "name a new folder")
    try:
        with explain_disk_errors(folder):
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if was_there:
            folder.mkdir(exist_ok=True)
        raise


def json_text(values: Any) -> str:
    """A JSON document for people and programs."""
    return json.dumps(values, indent=2, ensure_ascii=False)


def render(template: str, place: tuple[str, str] = _TEMPLATES, **values: Any) -> str:
    """Renders a template of a package's folder; in pages (``.html.jinja``) values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(*place),
        autoescape=template.endswith(".html.jinja"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    # A string of JSON is one of YAML, whatever it would be read as without its quotes.
    environment.filters["yaml"] = partial(json.dumps, ensure_ascii=False)
    return environment.get_template(template).render(values)


def parse_export(text: str) -> Path:
    """File of ``alpaca_eval=FILE``; UserError if it is another format, or names no file."""
    name, _, place = text.partition("=")
    if name != _FORMAT or not place:
        raise UserError(f"--export {text!r} is not FORMAT=FILE", f"formats: {_FORMAT}")
    return Path(place).expanduser()


def export(path: Path, model: str, task: str, responses: Iterable[Path]) -> None:
    """Writes `model_outputs` of AlpacaEval: the first sample of each prompt, one JSON array.

    Raises:
        UserError: A prompt is a conversation of several turns, which the format cannot hold.
    """
    rows = [
        {
            "instruction": _instruction(row),
            "output": row["response"],
            "generator": model,
            "dataset": task,
            "datasplit": "eval",
        }
        for shard in responses
        for row in read_rows(shard, RESPONSES, columns=_COLUMNS)
        if row["sample_index"] == 0
    ]
    write_file(path, json_text(rows) + "\n")


def _instruction(row: Mapping[str, Any]) -> str:
    """The one user turn of a prompt; a system message before it is not part of the format."""
    turns = [each for each in row["messages"] if each["role"] != "system"]
    if len(turns) != 1:
        raise UserError(
            f"the prompt {row['prompt_id']} is a conversation of {len(turns)} turns, and "
            f"{_FORMAT} holds one",
            "evaluate on prompts of one turn",
        )
    return str(turns[0]["content"])
