"""Files that a person reads or hands on, whole or not at all, and the templates of some."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from stages.contract.atomic import write_atomically
from stages.contract.disk import explain_disk_errors


def write_file(path: Path, content: str | bytes) -> Path:
    """Writes a file and returns its path; a reader sees the file before or the file after.

    A link stays, and what it leads to is written. What is no file and no place for one, such as
    `/dev/stdout`, takes the content as it comes.

    Args:
        path: The file; its folder is created.
        content: Text, written as UTF-8, or bytes.

    Raises:
        UserError: The disk is full, or the place cannot be written.
    """
    if path.exists() and not path.is_file():
        with explain_disk_errors(path):
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        write_atomically(Path(os.path.realpath(path)), content)
    return path


def json_text(values: Any) -> str:
    """A JSON document for people and programs."""
    return json.dumps(values, indent=2, ensure_ascii=False)


def csv_text(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Records with full precision, for programs.

    Args:
        rows: The records; a name that one lacks is empty in its line.
        names: Columns in their order.
    """
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, names)
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def render(template: str, **values: Any) -> str:
    """Renders a template; in pages (``.html.jinja``) every value is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flows.report"),
        autoescape=template.endswith(".html.jinja"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(values)
