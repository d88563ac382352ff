"""The ``math_verify`` oracle: 1 for the right final answer, 0 for any other or none.

The time limits of the library ``math-verify`` are off, since its processes have one.
"""

import logging
from typing import Any

from stages.harness.context import StageContext
from stages.score.answer_pool import AnswerPool, Check
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

_REMEDY = "install the extra `torch` of this package in the score stage's environment"


def load_grader() -> Check:
    """Loads the library in a process of the pool: the first answer's time does not pay for it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns once in each process that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # A boxed answer counts before any other.
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def read(text: str) -> list[Any]:
        return list(parse(text, targets, parsing_timeout=None))

    def grade(pair: tuple[str | None, str]) -> Verdict:
        reference, response = pair
        if reference is None:
            return Verdict(None, "the prompt has no reference answer")
        # Bare LaTeX is read only inside delimiters; what they spoil ("\\$10") as it stands.
        boxed = f"\\boxed{{{reference}}}"
        delimited = any(each in reference for each in ("$", "\\boxed", "\\(", "\\["))
        texts = (reference, boxed) if delimited else (boxed, reference)
        gold = read(texts[0]) or read(texts[1])
        if not gold:
            return Verdict(None, f"the reference answer {reference[:80]!r} cannot be read")
        answer = read(response)
        is_right = bool(answer) and verify(gold, answer, timeout_seconds=None)
        return Verdict(float(is_right), components={"answered": float(bool(answer))})

    return grade


def load(ctx: StageContext[ScoreParams]) -> AnswerPool:
    """Prepares the comparison; it needs no input beside the responses."""
    settings = ctx.params.math_verify
    return AnswerPool("math_verify", "math-verify", _REMEDY, load_grader, settings)
