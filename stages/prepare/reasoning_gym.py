"""Prompts of a reasoning-gym task, as JSON lines: a question, and all that its scorer needs.

It is a program of its own, ``python -m stages.prepare.reasoning_gym TASK SETTINGS FILE``, for
callers whose environment lacks the library. SETTINGS is a JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.metadata
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.contract.errors import EXIT_USER, UserError

# The library draws a seed where it is given none.
_SEED = 0


def rows(task: str, settings: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields a row for `prepare` for each entry of a task.

    Args:
        task: The task's name in the library.
        settings: Fields of the task's configuration, ``size`` and ``seed`` among them.

    Raises:
        UserError: The library is not installed, has no such task or setting, refuses a value, or
            the task's entries cannot be kept in a table.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise UserError(
            f"{sys.executable} lacks reasoning-gym ({error})",
            "run `make setup-eval`, and set execution.interpreters.eval to .venv-eval/bin/python",
        ) from error
    version = importlib.metadata.version("reasoning-gym")
    if task not in DATASETS:
        raise UserError(
            f"reasoning-gym {version} has no task {task!r}", _hint(task, sorted(DATASETS), "tasks")
        )
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for name in settings:
        if name not in known:
            raise UserError(
                f"the task {task} has no setting {name!r}", _hint(name, known, "settings")
            )
    settings = {"seed": _SEED, **settings}
    # For generators that draw from Python's own stream.
    random.seed(settings["seed"])
    made = {"version": version, "task": task, "settings": settings}
    try:
        dataset = create_dataset(task, **settings)
        for number in range(len(dataset)):
            entry = dataset[number]
            kept = json.dumps(made | {"entry": entry}, sort_keys=True)
            # JSON has no tuples, and some scorers compare with one.
            both = entry, json.loads(kept)["entry"]
            scores = [dataset.score_answer(entry["answer"], each) for each in both]
            if scores[0] != scores[1]:
                raise ValueError(
                    f"the right answer's score is {scores[0]}, and {scores[1]} from a table"
                )
            yield {"prompt": entry["question"], "reference_answer": kept}
    except Exception as error:
        # Configurations refuse values by whatever error comes first, often an assertion.
        raise UserError(
            f"the task {task} cannot be made with {json.dumps(settings)} "
            f"({type(error).__name__}: {error})",
            f"correct the values, or choose another task; its settings are {', '.join(known)}",
        ) from error


def _hint(name: str, known: Sequence[str], what: str) -> str:
    near = difflib.get_close_matches(name, known)
    return f"did you mean {' or '.join(near)}?" if near else f"{what} are {', '.join(known)}"


def main() -> int:
    """Writes the rows as the command line says; 64 for a mistake in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task")
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    try:
        with asked.file.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows(asked.task, asked.settings))
    except UserError as error:
        sys.stderr.write(f"{error.message}\n{error.remedy}\n")
        return EXIT_USER
    return 0


if __name__ == "__main__":
    sys.exit(main())
