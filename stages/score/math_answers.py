"""The ``math_verify`` oracle: 1 for the right final answer, 0 for any other or none.

The ``math-verify`` library's own time limits are off, since the processes that it works in have
one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from typing import Any, Literal

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.score.answer_pool import AnswerPool, Check
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

Grade = Literal["correct", "wrong", "no answer", "unreadable reference"]


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


def load_grader() -> Check:
    """Loads the library in a process of the pool."""
    # It warns once in each process that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Loaded here, so that the first answer's time limit does not pay for it.
    importlib.import_module("math_verify")
    return _verdict


def _verdict(pair: tuple[str, str]) -> Verdict:
    reference, response = pair
    found = grade(reference, response)
    if found == "unreadable reference":
        return Verdict(None, f"the reference answer {reference[:80]!r} cannot be read")
    answered = {"answered": float(found != "no answer")}
    return Verdict(float(found == "correct"), components=answered)


def load(ctx: StageContext[ScoreParams]) -> AnswerPool:
    """Prepares the comparison; it needs no input beside the responses."""
    try:
        identity = f"math_verify:{importlib.metadata.version('math-verify')}"
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the oracle math_verify needs the library math-verify, which is not installed",
            "install the extra `torch` of this package in the score stage's environment",
        ) from None
    return AnswerPool(identity, load_grader, ctx.params.math_verify)
