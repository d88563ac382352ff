"""The ``reasoning_gym`` oracle: the score that a task's own scorer gives, partial credit included.

Runs if ``reasoning_gym`` is installed: the environment and the image `eval`. Some scorers evaluate
an answer as Python or with sympy, so an answer can hang or end the process that scores it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.score.answer_pool import AnswerPool, Check
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

_LIBRARY = "reasoning-gym"


class _Reference(TypedDict):
    """Content of a prompt's reference answer, as `stages.prepare.reasoning_gym` writes it."""

    version: str
    task: str
    settings: dict[str, Any]
    entry: dict[str, Any]


_REFERENCE = TypeAdapter(_Reference)


def _load_scorer() -> Check:
    # Loaded here, so that the first answer's time limit does not pay for it.
    library, utils = map(importlib.import_module, ("reasoning_gym", "reasoning_gym.utils"))
    version = importlib.metadata.version(_LIBRARY)
    tasks: dict[str, Any] = {}

    def verdict(pair: tuple[str, str]) -> Verdict:
        try:
            reference = _REFERENCE.validate_json(pair[0])
        except ValidationError as error:
            return Verdict(None, f"the reference answer holds no task: {error.errors()[0]['msg']}")
        if reference["version"] != version:
            raise UserError(
                f"{_LIBRARY} {reference['version']} made the prompts, and the oracle has {version}",
                "give execution.interpreters.eval, and the image, the same version",
            )
        task, settings = reference["task"], reference["settings"]
        name = json.dumps([task, settings])
        if name not in tasks:
            tasks[name] = library.create_dataset(task, **settings)
        tagged = utils.extract_answer(pair[1])
        answer = pair[1].strip() if tagged is None else tagged
        parts = {"tagged": float(tagged is not None), "scorer_failed": 0.0}
        try:
            score = float(tasks[name].score_answer(answer, reference["entry"]))
        except Exception:
            # The scorer has read the right answer when the prompt was made, so this one is wrong.
            return Verdict(0.0, components=parts | {"scorer_failed": 1.0})
        return Verdict(score, components=parts)

    return verdict


def load(ctx: StageContext[ScoreParams]) -> AnswerPool:
    """Prepares the scorers; they need no input beside the responses."""
    try:
        identity = f"reasoning_gym:{importlib.metadata.version(_LIBRARY)}"
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"the oracle reasoning_gym needs the library {_LIBRARY}, which is not installed",
            "run `make setup-eval`, and set execution.interpreters.eval to .venv-eval/bin/python",
        ) from None
    return AnswerPool(identity, _load_scorer, ctx.params.reasoning_gym)
