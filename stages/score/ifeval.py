"""The ``ifeval`` oracle: verifiable instructions, checked by lm-eval's own code (Zhou et al. 2023).

Runs if ``lm_eval`` is installed: the environment and the image `eval`.
"""

import importlib.metadata
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

_REMEDY = "run `make setup-eval`, and set execution.interpreters.eval to .venv-eval/bin/python"
# Data by which lm-eval's checkers split sentences and words; they fetch it when imported.
_TOKENIZER = "punkt_tab"


class _Instructions(TypedDict):
    """Content of a prompt's reference answer: columns of the data set `google/IFEval`."""

    instruction_id_list: list[str]
    kwargs: list[dict[str, Any] | None]


_INSTRUCTIONS = TypeAdapter(_Instructions)


@dataclass(frozen=True)
class InstructionChecks:
    """Scores 1 for a response that follows all of its prompt's instructions, 0 for any other.

    ``check`` takes a row of the data set and a response to the checks' results.
    """

    identity: str
    check: Any

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        for place, row in enumerate(rows):
            yield place, self._verdict(row)

    def _verdict(self, row: Mapping[str, Any]) -> Verdict:
        try:
            wanted = _INSTRUCTIONS.validate_json(row["reference_answer"] or "null")
        except ValidationError as error:
            return Verdict(None, f"the reference answer holds no instructions: {error.errors()[0]}")
        # Checkers without their arguments draw them; langdetect draws too.
        random.seed(row["prompt_id"])
        prompt = row["messages"][-1]["content"]
        arguments = [each or {} for each in wanted["kwargs"]]
        try:
            found = self.check(
                {"key": 0, "prompt": prompt, **wanted, "kwargs": arguments}, [row["response"]]
            )
        except (KeyError, TypeError, ValueError, IndexError, re.error) as error:
            why = f"the instructions cannot be checked ({type(error).__name__}: {error})"
            return Verdict(None, why)
        strict = found["inst_level_strict_acc"]
        loose = found["inst_level_loose_acc"]
        return Verdict(
            float(found["prompt_level_strict_acc"]),
            components={
                "prompt_loose": float(found["prompt_level_loose_acc"]),
                "instructions": float(len(strict)),
                "instructions_strict": float(sum(strict)),
                "instructions_loose": float(sum(loose)),
            },
        )


def load(ctx: StageContext[ScoreParams]) -> InstructionChecks:
    """Loads lm-eval's checkers."""
    try:
        import nltk

        # Before lm-eval's import, which would fetch it.
        nltk.data.find(f"tokenizers/{_TOKENIZER}")
        from langdetect import DetectorFactory
        from lm_eval.tasks.ifeval.utils import process_results
    except ImportError as error:
        raise UserError(f"the oracle ifeval needs lm-eval's code ({error})", _REMEDY) from error
    except LookupError:
        raise UserError(
            f"the oracle ifeval needs nltk's data {_TOKENIZER}, which is in none of "
            f"{', '.join(nltk.data.path)}",
            f"`.venv-eval/bin/python -m nltk.downloader {_TOKENIZER}` where there is a network, or "
            f"set NLTK_DATA to a folder with tokenizers/{_TOKENIZER}",
        ) from None
    DetectorFactory.seed = 0
    version = importlib.metadata.version("lm_eval")
    return InstructionChecks(f"ifeval:lm_eval-{version}", process_results)
