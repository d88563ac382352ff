"""The ``reasoning_gym`` oracle: the score that a task's own scorer gives, partial credit included.

Runs if ``reasoning_gym`` is installed: the environment and the image `eval`. Some scorers evaluate
an answer as Python or with sympy, so an answer can hang or end the process that scores it.
"""

import importlib.metadata
import json
from typing import Any

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.score.answer_pool import AnswerPool, Check
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

_LIBRARY = "reasoning-gym"
_REMEDY = "run `make setup-eval`, and set execution.interpreters.eval to .venv-eval/bin/python"


def load_scorer() -> Check:
    """Loads the library in a process of the pool: the first answer's time does not pay for it."""
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer

    version = importlib.metadata.version(_LIBRARY)
    tasks: dict[str, Any] = {}

    def verdict(pair: tuple[str | None, str]) -> Verdict:
        try:
            reference = json.loads(pair[0] or "null")
            names = ("version", "task", "settings", "entry")
            made_by, task, settings, entry = (reference[name] for name in names)
        except (ValueError, KeyError, TypeError):
            return Verdict(None, "the reference answer holds no task of reasoning-gym")
        if made_by != version:
            raise UserError(
                f"{_LIBRARY} {made_by} made the prompts, and the oracle has {version}",
                "give execution.interpreters.eval, and the image, the same version",
            )
        name = json.dumps([task, settings])
        if name not in tasks:
            tasks[name] = create_dataset(task, **settings)
        tagged = extract_answer(pair[1])
        answer = pair[1].strip() if tagged is None else tagged
        try:
            score = float(tasks[name].score_answer(answer, entry))
        except Exception:
            # The scorer has read the right answer when the prompt was made, so this one is wrong.
            score = 0.0
        return Verdict(score, components={"tagged": float(tagged is not None)})

    return verdict


def load(ctx: StageContext[ScoreParams]) -> AnswerPool:
    """Prepares the scorers; they need no input beside the responses."""
    settings = ctx.params.reasoning_gym
    return AnswerPool("reasoning_gym", _LIBRARY, _REMEDY, load_scorer, settings)
