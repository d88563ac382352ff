"""The ``math_verify`` oracle: 1 for the right final answer, 0 for any other or none.

The ``math-verify`` library bounds its work by SIGALRM, which only the main thread can take and
which cannot interrupt a single long operation (``9^{9^{9}}`` is one). So its own limits are off,
and it works in processes that are killed when they take too long: the stage's signals stay its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.modeling.process_pool import ProcessPool
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

Grade = Literal["correct", "wrong", "no answer", "unreadable reference", "timeout", "crash"]


def grade(reference: str, response: str) -> Grade:
    """Compares the final answer of a response with the reference answer.

    A boxed answer counts before any other. It has no time limit of its own: the pool has one.

    Args:
        reference: The right answer, in LaTeX or plain; without delimiters, or in them.
        response: Text that ends in an answer.
    """
    from math_verify import verify

    # Bare LaTeX is read only inside delimiters; what they spoil ("\$10") is read as it stands.
    boxed = f"\\boxed{{{reference}}}"
    delimited = any(each in reference for each in ("$", "\\boxed", "\\(", "\\["))
    for text in (reference, boxed) if delimited else (boxed, reference):
        gold = _parse(text)
        if gold:
            break
    else:
        return "unreadable reference"
    answer = _parse(response)
    if not answer:
        return "no answer"
    return "correct" if verify(gold, answer, timeout_seconds=None) else "wrong"


def _parse(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return list(parse(text, targets, parsing_timeout=None))


def _load_grader() -> Callable[[tuple[str, str]], Grade]:
    # It warns once in each process that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Loaded here, so that the first answer's time limit does not pay for it.
    importlib.import_module("math_verify")
    return _grade_pair


def _grade_pair(pair: tuple[str, str]) -> Grade:
    return grade(*pair)


class MathAnswers:
    """Compares each response's final answer with the prompt's reference answer.

    Args:
        size: Number of processes that compare.
        timeout_seconds: Wall time for one answer.
    """

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.identity = f"math_verify:{importlib.metadata.version('math-verify')}"
        self._timeout_seconds = timeout_seconds
        self._pool: ProcessPool[tuple[str, str], Grade] = ProcessPool(
            _load_grader, [{}] * size, timeout_seconds=timeout_seconds
        )
        self.close = self._pool.close

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        places = []
        for place, row in enumerate(rows):
            if row["reference_answer"] is None:
                yield place, Verdict(None, "the prompt has no reference answer")
            else:
                places.append(place)
        pairs = ((rows[place]["reference_answer"], rows[place]["response"]) for place in places)
        for number, found in self._pool.stream(pairs):
            yield places[number], self._verdict(rows[places[number]], found)

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
                return Verdict(None, f"the answer took more than {self._timeout_seconds:g} s")
            case "crash":
                return Verdict(None, "the process that compared the answer died")


def load(ctx: StageContext[ScoreParams]) -> MathAnswers:
    """Prepares the comparison; it needs no input beside the responses."""
    settings = ctx.params.math_verify
    try:
        return MathAnswers(min(settings.processes, os.cpu_count() or 1), settings.timeout_seconds)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the oracle math_verify needs the library math-verify, which is not installed",
            "install the extra `torch` of this package in the score stage's environment",
        ) from None
