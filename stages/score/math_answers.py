"""The ``math_verify`` oracle: 1 for the right final answer, 0 for any other or none."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.contract.context import StageContext
from stages.contract.errors import UserError
from stages.score.grading import Grade, GraderPool
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

# Answers graded before their verdicts are handed on.
_AT_ONCE = 256


@dataclass(frozen=True)
class MathAnswers:
    """Compares each response's final answer with the prompt's reference answer.

    Attributes:
        pool: The processes that compare.
        identity: The library and its version.
        timeout_seconds: Time that an answer is given.
    """

    pool: GraderPool
    identity: str
    timeout_seconds: float

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            gradable = [row for row in some if row["reference_answer"] is not None]
            grades = iter(
                self.pool.grade([(row["reference_answer"], row["response"]) for row in gradable])
            )
            for place, row in enumerate(some, start):
                if row["reference_answer"] is None:
                    yield place, Verdict(None, "the prompt has no reference answer")
                else:
                    yield place, self._verdict(row, next(grades))

    def _verdict(self, row: Mapping[str, Any], grade: Grade) -> Verdict:
        match grade:
            case "correct":
                return Verdict(1.0, components={"answered": 1.0})
            case "wrong":
                return Verdict(0.0, components={"answered": 1.0})
            case "no answer":
                return Verdict(0.0, components={"answered": 0.0})
            case "unreadable reference":
                reference = row["reference_answer"][:80]
                return Verdict(None, f"the reference answer {reference!r} cannot be read")
            case "timeout":
                return Verdict(None, f"the answer took more than {self.timeout_seconds:g} s")
            case "crash":
                return Verdict(None, "the process that compared the answer died")


def load(ctx: StageContext[ScoreParams]) -> MathAnswers:
    """Prepares the comparison; it needs no input beside the responses.

    Raises:
        UserError: The library is not installed.
    """
    try:
        version = importlib.metadata.version("math-verify")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the oracle math_verify needs the library math-verify, which is not installed",
            "install the extra `torch` of this package in the score stage's environment",
        ) from None
    settings = ctx.params.math_verify
    pool = GraderPool(min(settings.processes, os.cpu_count() or 1), settings.timeout_seconds)
    return MathAnswers(pool, f"math_verify:{version}", settings.timeout_seconds)
