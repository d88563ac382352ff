"""Command ``geb init``: the folder of a new task, which runs as it is."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer
import yaml
from rich.markup import escape

from flows.commands.common import console
from flows.pipeline.loading import load_config
from flows.runners.local.gpu_locks import gpus_of_this_host
from stages.contract.errors import UserError


class Kind(StrEnum):
    """Kinds of tasks, by the scorer of their responses."""

    FUNCTION = "function"
    MODEL = "model"
    ANSWERS = "answers"
    JUDGE = "judge"


_MEANING = {
    Kind.FUNCTION: "a Python function of yours",
    Kind.MODEL: "a reward model (sequence classifier)",
    Kind.ANSWERS: "reference answers that can be verified (mathematics)",
    Kind.JUDGE: "a judge: a chat model at an OpenAI-compatible address",
}
_CODE = ("oracle.py", "test_oracle.py")
# Of a run.
_MAX_NAME = 100


def register(app: typer.Typer) -> None:
    """Adds this command."""
    app.command()(init)


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder; new, or empty.")],
    kind: Annotated[
        Kind | None, typer.Option(help="What scores responses; asked for on a terminal.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model to train, a folder or hub id; a tiny sample model if left out.",
        ),
    ] = None,
    reward_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="For --kind model: folder or hub id.")
    ] = None,
    judge_url: Annotated[
        str | None, typer.Option(metavar="URL", help="For --kind judge: its address, …/v1.")
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="For --kind judge: the model's name there.")
    ] = None,
) -> None:
    """Make the folder of a task: configuration, reward function with a test, sample prompts."""
    target = folder.expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is there and not empty", "name a new folder")
    chosen = kind or _ask_kind()
    needed = {
        Kind.MODEL: {"reward_model": reward_model},
        Kind.JUDGE: {"judge_url": judge_url, "judge_model": judge_model},
    }
    answers = {name: given or _ask(name) for name, given in needed.get(chosen, {}).items()}
    # Folders are named from here; the configuration names them from its own.
    found: dict[str, str | None] = {name: _from_here(value) for name, value in answers.items()}
    write_task(target, chosen, found | {"policy": _from_here(policy) if policy else None})
    console.print(f"{target} is ready; what each file is: {target / 'README.md'}", markup=False)
    console.print(f"next: [bold]cd {escape(str(folder))}[/], then [bold]geb run geb.yaml[/]")


def write_task(folder: Path, kind: Kind, answers: Mapping[str, str | None]) -> None:
    """Writes the files of a task.

    Args:
        folder: An absolute path; made where it is not there.
        kind: What scores responses.
        answers: `policy`, and what the kind needs: `reward_model`, or `judge_url`, `judge_model`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flows.commands", "templates/init"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["yaml"] = _yaml
    values = {
        **answers,
        "name": _name(folder),
        "kind": str(kind),
        "gpus": len(gpus_of_this_host()),
        "num_prompts": NUM_PROMPTS,
        "store": str(folder / "store"),
    }
    files = ["geb.yaml", "README.md", *(_CODE if kind is Kind.FUNCTION else ())]
    for name in files:
        page = environment.get_template(f"{name}.jinja").render(values)
        (folder / name).write_text(page, encoding="utf-8")
    _write_rows(folder / "prompts.jsonl", prompts(kind))
    if answers["policy"] is None:
        _write_rows(folder / "conversations.jsonl", conversations(kind))
    load_config(folder / "geb.yaml")


def _yaml(text: str) -> str:
    """A string as YAML, quoted where it would be read as something else: ``2024``, ``a #b``."""
    shown = yaml.safe_dump([text], default_flow_style=True, width=math.inf, allow_unicode=True)
    return shown.strip()[1:-1]


def _name(folder: Path) -> str:
    """Name of the run: the folder's, as far as a run may be called so."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-._")
    return plain[:_MAX_NAME] or "task"


def _from_here(place: str) -> str:
    """A path that is there in full; hub ids and addresses as they are."""
    path = Path(place).expanduser()
    return str(path.absolute()) if path.exists() else place


def _ask_kind() -> Kind:
    if not sys.stdin.isatty():
        return Kind.FUNCTION
    for each in Kind:
        console.print(f"  {each:<9} {_MEANING[each]}")
    said = typer.prompt("What scores the responses?", default=Kind.FUNCTION.value)
    try:
        return Kind(said)
    except ValueError:
        raise UserError(f"{said!r} is none of these", f"one of: {', '.join(Kind)}") from None


def _ask(name: str) -> str:
    if not sys.stdin.isatty():
        option = f"--{name.replace('_', '-')}"
        raise UserError(f"{option} is missing", f"give {option}, or call geb init on a terminal")
    return str(typer.prompt(name.replace("_", " ").capitalize()))


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


NUM_PROMPTS = 640
NUM_CONVERSATIONS = 1500

_ASKING = ("Please bring {} to room {}.", "We need {} in room {}.", "Could room {1} have {0}?")
_NUMBERS = ("two", "three", "four", "five")
_THINGS = ("towels", "pillows", "cups", "keys", "maps", "lamps", "chairs", "plates")
_ROOMS = range(1, 41)
_OPENINGS = ("Okay", "Yes", "Certainly")
# Prime to the number of orders, so that steps of it visit each of them once.
_STRIDE = 1009


def orders() -> Iterator[dict[str, Any]]:
    """Prompts of a hotel's front desk, with what a right answer repeats."""
    found = [
        {
            "prompt": asking.format(f"{number} {thing}", room),
            "reference_answer": f"{number} {thing} for room {room}",
        }
        for asking, number, thing, room in itertools.product(_ASKING, _NUMBERS, _THINGS, _ROOMS)
    ]
    return (found[place * _STRIDE % len(found)] for place in range(len(found)))


def sums() -> Iterator[dict[str, Any]]:
    """Prompts with an answer that can be verified."""
    found = [
        {"prompt": f"What is {a} plus {b}?", "reference_answer": str(a + b)}
        for a, b in itertools.product(range(1, 49), range(1, 81))
    ]
    return (found[place * _STRIDE % len(found)] for place in range(len(found)))


def prompts(kind: str) -> list[dict[str, Any]]:
    """Sample prompts of a kind of task."""
    return list(itertools.islice(_rows(kind), NUM_PROMPTS))


def conversations(kind: str) -> list[dict[str, Any]]:
    """Sample conversations for the warm start, on other prompts than :func:`prompts`."""
    rows = itertools.islice(_rows(kind), NUM_PROMPTS, NUM_PROMPTS + NUM_CONVERSATIONS)
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": _answer(kind, row["reference_answer"], place)},
            ]
        }
        for place, row in enumerate(rows)
    ]


def _rows(kind: str) -> Iterator[dict[str, Any]]:
    return sums() if kind == "answers" else orders()


def _answer(kind: str, reference: str, place: int) -> str:
    if kind == "answers":
        # Every third is wrong: there is something to learn from its rewards.
        wrong = place % len(_OPENINGS) == 0
        return f"It is {int(reference) + 1 if wrong else reference}."
    return f"{_OPENINGS[place % len(_OPENINGS)]}, {reference}."
