"""The ``reasoning_gym`` oracle: the score that a task's own scorer gives, partial credit included.

Runs if ``reasoning_gym`` is installed: the environment and the image `eval`. Some scorers evaluate
an answer as Python or with sympy, so an answer can hang or end the process that scores it. They
work in processes with a time limit.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.modeling.process_pool import CRASH, TIMEOUT, ProcessPool
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

_LIBRARY = "reasoning-gym"
# A task's reference answer as JSON, and a response.
_Pair = tuple[str, str]


class _Reference(TypedDict):
    """Content of a prompt's reference answer, as `stages.prepare.reasoning_gym` writes it."""

    version: str
    task: str
    settings: dict[str, Any]
    entry: dict[str, Any]


_REFERENCE = TypeAdapter(_Reference)


def _load_scorer() -> Callable[[_Pair], Verdict]:
    # Loaded here, so that the first answer's time limit does not pay for it.
    library, utils = map(importlib.import_module, ("reasoning_gym", "reasoning_gym.utils"))
    scorers: dict[str, Any] = {}

    def verdict(pair: _Pair) -> Verdict:
        reference, response = json.loads(pair[0]), pair[1]
        name = json.dumps([reference["task"], reference["settings"]])
        if name not in scorers:
            scorers[name] = library.create_dataset(reference["task"], **reference["settings"])
        tagged = utils.extract_answer(response)
        answer = response.strip() if tagged is None else tagged
        parts = {"tagged": float(tagged is not None), "scorer_failed": 0.0}
        try:
            return Verdict(
                float(scorers[name].score_answer(answer, reference["entry"])), None, parts
            )
        except Exception:
            # The scorer gave the right answer its score when the prompt was made: what it cannot
            # read is a wrong one.
            return Verdict(0.0, None, parts | {"scorer_failed": 1.0})

    return verdict


class TaskScorers:
    """Scores each response by the scorer of its prompt's task.

    Args:
        size: Number of processes that score.
        timeout_seconds: Wall time for one answer.
    """

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self._version = importlib.metadata.version(_LIBRARY)
        self.identity = f"reasoning_gym:{self._version}"
        self._timeout_seconds = timeout_seconds
        self._pool: ProcessPool[_Pair, Any] = ProcessPool(
            _load_scorer, [{}] * size, timeout_seconds=timeout_seconds
        )
        self.close = self._pool.close

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        places = []
        for place, row in enumerate(rows):
            try:
                reference = _REFERENCE.validate_json(row["reference_answer"] or "null")
            except ValidationError as error:
                found = error.errors()[0]["msg"]
                yield place, Verdict(None, f"the reference answer holds no task: {found}")
                continue
            if reference["version"] != self._version:
                raise UserError(
                    f"the prompts were made by {_LIBRARY} {reference['version']}, and the oracle "
                    f"has {self._version}",
                    "install one version for both: execution.interpreters.eval makes the prompts, "
                    "and scores where no container or cluster does",
                )
            places.append(place)
        pairs = ((rows[place]["reference_answer"], rows[place]["response"]) for place in places)
        for number, found in self._pool.stream(pairs):
            yield places[number], self._verdict(found)

    def _verdict(self, found: Any) -> Verdict:
        if found == TIMEOUT:
            return Verdict(None, f"the answer took more than {self._timeout_seconds:g} s")
        if found == CRASH:
            return Verdict(None, "the process that scored the answer died")
        assert isinstance(found, Verdict)
        return found


def load(ctx: StageContext[ScoreParams]) -> TaskScorers:
    """Prepares the scorers; they need no input beside the responses."""
    settings = ctx.params.reasoning_gym
    try:
        return TaskScorers(min(settings.processes, os.cpu_count() or 1), settings.timeout_seconds)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"the oracle reasoning_gym needs the library {_LIBRARY}, which is not installed",
            "run `make setup-eval`, and set execution.interpreters.eval to .venv-eval/bin/python",
        ) from None
