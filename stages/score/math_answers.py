"""The ``math_verify`` oracle: 1 for the right final answer, 0 for any other or none."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.contract.context import StageContext
from stages.contract.errors import UserError
from stages.score.answers import prompt_starts
from stages.score.grading import Grade, GraderPool, count_votes
from stages.score.oracle import Verdict
from stages.score.params import VOTES, ScoreParams

# Answers graded before their verdicts are handed on.
_AT_ONCE = 256

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class MathAnswers:
    """Compares each response's final answer with the prompt's reference answer.

    Attributes:
        pool: The processes that compare.
        identity: The library and its version.
        timeout_seconds: Time that an answer is given.
        counts_votes: Whether to count the samples of its prompt that give an equal answer.
    """

    pool: GraderPool
    identity: str
    timeout_seconds: float
    counts_votes: bool = False

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        for start, stop in _portions(rows):
            some = rows[start:stop]
            gradable = [row for row in some if row["reference_answer"] is not None]
            grades = self.pool.grade(
                [(row["reference_answer"], row["response"]) for row in gradable]
            )
            votes = self._votes(gradable, grades)
            known = iter(zip(grades, votes, strict=True))
            for place, row in enumerate(some, start):
                if row["reference_answer"] is None:
                    yield place, Verdict(None, "the prompt has no reference answer")
                else:
                    grade, voted = next(known)
                    verdict = self._verdict(row, grade)
                    yield place, replace(verdict, components={**verdict.components, **voted})

    def _votes(self, rows: Rows, grades: Sequence[Grade]) -> list[dict[str, float]]:
        """The component `votes` of each row, where it is asked for."""
        if not self.counts_votes:
            return [{} for _ in rows]
        responses = [(row["prompt_id"], row["response"]) for row in rows]
        return [{VOTES: float(count)} for count in count_votes(self.pool, responses, grades)]

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


def _portions(rows: Rows) -> Iterator[tuple[int, int]]:
    """Bounds of portions of whole prompts, each at least :data:`_AT_ONCE` rows but the last."""
    first = 0
    for stop in prompt_starts(rows)[1:]:
        if stop - first >= _AT_ONCE or stop == len(rows):
            yield first, stop
            first = stop


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
    identity = f"math_verify:{version}"
    return MathAnswers(pool, identity, settings.timeout_seconds, settings.votes)
