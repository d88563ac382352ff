"""Files that a person reads or hands on: their folder, pages and JSON."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from stages.contract.atomic import explain_disk_errors
from stages.contract.errors import UserError

_TEMPLATES = ("flows.report", "templates")


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
