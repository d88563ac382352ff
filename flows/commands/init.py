"""Command ``geb init``: the folder of a new task, which runs as it is."""

import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from flows.commands.common import console
from flows.pipeline.loading import load_config
from flows.report.files import new_folder, render
from flows.runners.local.gpus import gpus_of_this_host
from stages.contract.errors import UserError


class Kind(StrEnum):
    """Kinds of tasks, by the scorer of their responses."""

    FUNCTION = "function"
    MODEL = "model"
    ANSWERS = "answers"
    JUDGE = "judge"


_TEMPLATES = ("flows.commands", "templates/init")
_CODE = ("oracle.py", "test_oracle.py")
# Longest name of a run.
_MAX_NAME = 100
_NUM_PROMPTS = 640
_NUM_CONVERSATIONS = 1500
_ASKING = ("Please bring {} to room {}.", "We need {} in room {}.", "Could room {1} have {0}?")
_NUMBERS = ("two", "three", "four", "five")
_THINGS = ("towels", "pillows", "cups", "keys", "maps", "lamps", "chairs", "plates")
_ROOMS = range(1, 41)
_OPENINGS = ("Okay", "Yes", "Certainly")
# Weights in files of at most so many bytes, about a billion of them, are a small model's.
_SMALL = 2 * 2**30
# Prime to the number of orders, so that steps of it visit each of them once.
_STRIDE = 1009


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder; new, or empty.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="What scores responses: a Python function of yours, a reward model (sequence "
            "classifier), reference answers that can be verified (mathematics), or a judge (a chat "
            "model at an OpenAI-compatible address)."
        ),
    ] = Kind.FUNCTION,
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
    needed = {
        Kind.MODEL: {"reward_model": reward_model},
        Kind.JUDGE: {"judge_url": judge_url, "judge_model": judge_model},
    }.get(kind, {})
    for name, given in needed.items():
        if given is None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is missing", f"give {option}: --kind {kind} needs it")
    # Folders are named from here; the configuration names them from its own.
    answers = {name: given and _from_here(given) for name, given in needed.items()}
    with new_folder(target):
        write_task(target, kind, {**answers, "policy": policy and _from_here(policy)})
    console.print(f"{target} is ready; what each file is: {target / 'README.md'}", markup=False)
    console.print(
        f"next: [bold]cd {escape(shlex.quote(str(folder)))}[/], then [bold]geb run geb.yaml[/]"
    )


def write_task(folder: Path, kind: Kind, answers: Mapping[str, str | None]) -> None:
    """Writes the files of a task.

    ``answers`` has `policy`, and what the kind needs: `reward_model`, or `judge_url` and
    `judge_model`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        **answers,
        "name": _name(folder),
        "kind": str(kind),
        "gpus": len(gpus_of_this_host()),
        "small": _is_small(answers["policy"]),
        "num_prompts": _NUM_PROMPTS,
        "store": str(folder / "store"),
    }
    files = ["geb.yaml", "README.md", *(_CODE if kind is Kind.FUNCTION else ())]
    for name in files:
        page = render(f"{name}.jinja", _TEMPLATES, **values)
        (folder / name).write_text(page, encoding="utf-8")
    rows = _sums() if kind is Kind.ANSWERS else _orders()
    _write_rows(folder / "prompts.jsonl", rows[:_NUM_PROMPTS])
    if answers["policy"] is None:
        # On other prompts than the samples.
        others = rows[_NUM_PROMPTS : _NUM_PROMPTS + _NUM_CONVERSATIONS]
        _write_rows(folder / "conversations.jsonl", _conversations(kind, others))
    load_config(folder / "geb.yaml")


def _name(folder: Path) -> str:
    """Name of the run: the folder's, as far as a run may be called so."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-._")
    return plain[:_MAX_NAME] or "task"


def _from_here(place: str) -> str:
    """A path that is there in full; hub ids and addresses as they are."""
    path = Path(place).expanduser()
    return str(path.absolute()) if path.exists() else place


def _is_small(policy: str | None) -> bool:
    """True for a small model that is on this machine; what a hub has is not looked at."""
    if policy is None or not (place := Path(policy)).exists():
        return False
    return sum(file.stat().st_size for file in place.glob("*.safetensors")) <= _SMALL


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def _orders() -> list[dict[str, Any]]:
    """Prompts of a hotel's front desk, with what a right answer repeats."""
    return _shuffled(
        (asking.format(f"{number} {thing}", room), f"{number} {thing} for room {room}")
        for asking, number, thing, room in itertools.product(_ASKING, _NUMBERS, _THINGS, _ROOMS)
    )


def _sums() -> list[dict[str, Any]]:
    """Prompts with an answer that can be verified."""
    return _shuffled(
        (f"What is {a} plus {b}?", str(a + b))
        for a, b in itertools.product(range(1, 49), range(1, 81))
    )


def _shuffled(pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    rows = [{"prompt": prompt, "reference_answer": answer} for prompt, answer in pairs]
    return [rows[place * _STRIDE % len(rows)] for place in range(len(rows))]


def _conversations(kind: Kind, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Sample conversations for the warm start."""
    for place, row in enumerate(rows):
        opening = _OPENINGS[place % len(_OPENINGS)]
        reference = row["reference_answer"]
        answer = f"{opening}, {reference}."
        if kind is Kind.ANSWERS:
            # Every third is wrong: there is something to learn from its rewards.
            answer = f"It is {int(reference) + (opening == _OPENINGS[0])}."
        yield {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": answer},
            ]
        }
