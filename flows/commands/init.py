"""Command ``geb init``: the folder of a new task, which runs as it is."""

import itertools
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from flows.commands.common import NewFolder, console
from flows.pipeline.loading import load_config
from flows.report.files import new_folder, render
from flows.runners.local.gpus import gpus_of_this_host

_TEMPLATES = ("flows.commands", "templates/init")
_FILES = ("geb.yaml", "README.md", "oracle.py", "test_oracle.py")
# Longest name of a run.
_MAX_NAME = 100
_NUM_PROMPTS = 640
_NUM_CONVERSATIONS = 1500
_ASKING = ("Please bring {} to room {}.", "We need {} in room {}.", "Could room {1} have {0}?")
_NUMBERS = ("two", "three", "four", "five")
_THINGS = ("towels", "pillows", "cups", "keys", "maps", "lamps", "chairs", "plates")
_ROOMS = range(1, 41)
_OPENINGS = ("Okay", "Yes", "Certainly")
# Weights of a model with less than a billion parameters.
_SMALL_BYTES = 2 << 30
# Prime to the number of orders, so that steps of it visit each of them once.
_STRIDE = 1009


def init(
    folder: NewFolder,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model to train, a folder or hub id; a tiny sample model if left out.",
        ),
    ] = None,
) -> None:
    """Make the folder of a task: configuration, reward function with a test, sample prompts."""
    target = folder.expanduser().absolute()
    if policy is not None and Path(policy).expanduser().exists():
        # The configuration's paths start in its own folder.
        policy = str(Path(policy).expanduser().absolute())
    with new_folder(target):
        write_task(target, policy)
    console.print(f"{target} is ready; what each file is: {target / 'README.md'}", markup=False)
    console.print(
        f"next: [bold]cd {escape(shlex.quote(str(folder)))}[/], then [bold]geb run geb.yaml[/]"
    )


def write_task(folder: Path, policy: str | None) -> None:
    """Writes the files of a task; without a policy, the task makes a tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-._")
    values = {
        "policy": policy,
        "name": name[:_MAX_NAME] or "task",
        "is_small": policy is not None and 0 < _bytes_of_weights(Path(policy)) < _SMALL_BYTES,
        "gpus": len(gpus_of_this_host()),
        "num_prompts": _NUM_PROMPTS,
        "store": str(folder / "store"),
    }
    for file in _FILES:
        page = render(f"{file}.jinja", _TEMPLATES, **values)
        (folder / file).write_text(page, encoding="utf-8")
    rows = _orders()
    _write_rows(folder / "prompts.jsonl", rows[:_NUM_PROMPTS])
    if policy is None:
        # On other prompts than the samples.
        others = rows[_NUM_PROMPTS : _NUM_PROMPTS + _NUM_CONVERSATIONS]
        openings = itertools.cycle(_OPENINGS)
        conversations = map(_conversation, others, openings)
        _write_rows(folder / "conversations.jsonl", conversations)
    load_config(folder / "geb.yaml")


def _bytes_of_weights(folder: Path) -> int:
    """Size of a local model's weights; 0 for a model of the hub."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def _orders() -> list[dict[str, Any]]:
    """Prompts of a hotel's front desk, with what a right answer repeats, in a mixed order."""
    rows: list[dict[str, Any]] = []
    for asking, number, thing, room in itertools.product(_ASKING, _NUMBERS, _THINGS, _ROOMS):
        order = f"{number} {thing}"
        answer = f"{order} for room {room}"
        rows.append({"prompt": asking.format(order, room), "reference_answer": answer})
    return [rows[place * _STRIDE % len(rows)] for place in range(len(rows))]


def _conversation(row: dict[str, Any], opening: str) -> dict[str, Any]:
    """A sample conversation for the warm start."""
    answer = f"{opening}, {row['reference_answer']}."
    return {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": answer},
        ]
    }
