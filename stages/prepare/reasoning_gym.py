"""Prompts of a reasoning-gym task, as JSON lines: a question, and all that its scorer needs.

It is a program of its own, ``python -m stages.prepare.reasoning_gym ASKED FILE``, for callers whose
environment lacks the library. ASKED is a JSON object with the arguments of :func:`rows`.
"""

import dataclasses
import difflib
import importlib.metadata
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.harness.program import run_program


def rows(place: str, task: str, settings: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields a row for `prepare` for each entry of a task.

    Args:
        place: The task and its settings as a person wrote them.
        task: The task's name in the library.
        settings: Fields of the task's configuration, ``size`` and ``seed`` among them.

    Raises:
        UserError: The library is not installed, has no such task or setting, refuses a value, or
            the task's scorer needs more than a table can keep.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise UserError(
            f"{place}: {sys.executable} lacks reasoning-gym ({error})",
            "run `make setup-eval`, and set execution.interpreters.eval to .venv-eval/bin/python",
        ) from error
    version = importlib.metadata.version("reasoning-gym")
    _require_known(place, f"reasoning-gym {version} has no task", [task], sorted(DATASETS))
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    _require_known(place, f"the task {task} has no setting", settings, known)
    # Without a seed the library draws one.
    settings = {"seed": 0, **settings}
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
            f"{place}: the task cannot be made ({type(error).__name__}: {error})",
            f"correct the values, or choose another task; its settings are {', '.join(known)}",
        ) from error


def _require_known(place: str, message: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"{place}: {message} {name!r}", hint)


def _make(events: Emitter) -> None:
    """Writes the rows that the command line asks for."""
    asked, place = sys.argv[1:]
    with Path(place).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(**json.loads(asked)))
    events.info("made")


if __name__ == "__main__":
    run_program(_make)
