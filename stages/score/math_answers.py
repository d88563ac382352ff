"""The ``math_verify`` oracle: 1 for the right final answer, 0 for any other or none.

The library bounds its work by SIGALRM, which only the main thread can take and which cannot
interrupt a single long operation (``9^{9^{9}}`` is one). So its time limits are off, and answers
are checked in processes that are killed when they take too long.
"""

import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.modeling.process_pool import CRASH, TIMEOUT, ProcessPool
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

Check = Callable[[tuple[str | None, str]], Verdict]
"""Verdict on a reference answer, if the prompt has one, and a response."""
TIMEOUT_SECONDS = 10.0
"""Wall time for one answer; one that takes longer gets no score."""
# At most one for each core.
_MOST_PROCESSES = 8


class MathVerify:
    """Checks each response against its prompt's reference answer."""

    def __init__(self) -> None:
        try:
            self.identity = f"math_verify:{importlib.metadata.version('math-verify')}"
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                "the oracle math_verify needs the library math-verify, which is not installed",
                "install the extra `torch` of this package in the score stage's environment",
            ) from None
        places: list[dict[str, str]] = [{}] * min(_MOST_PROCESSES, os.cpu_count() or 1)
        self._pool: ProcessPool[Any, Any] = ProcessPool(load_grader, places, TIMEOUT_SECONDS)
        self.close = self._pool.close

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        pairs = ((row["reference_answer"], row["response"]) for row in rows)
        for place, verdict in self._pool.stream(pairs):
            if verdict == TIMEOUT:
                why = f"the answer took more than {TIMEOUT_SECONDS:g} s"
                yield place, Verdict(None, why)
            elif verdict == CRASH:
                yield place, Verdict(None, "the process that checked the answer died")
            else:
                yield place, verdict


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


def load(ctx: StageContext[ScoreParams]) -> MathVerify:
    """Prepares the comparison, which reads the responses alone."""
    return MathVerify()
