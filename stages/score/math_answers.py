"""The ``math_verify`` oracle: 1 for the right final answer, 0 for any other or none.

The library bounds its work by SIGALRM, which only the main thread can take and which cannot
interrupt a single long operation (``9^{9^{9}}`` is one). So its time limits are off, and each
answer is checked in a fork that is killed when it takes too long.
"""

import importlib.metadata
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.harness.supervisor import die_with_parent
from stages.score.oracle import OracleVerdict
from stages.score.params import ScoreParams

AnswerPair = tuple[str | None, str]
"""A reference answer, if the prompt has one, and a response."""
ANSWER_SECONDS = 10.0
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
        # Not forked: this process may hold threads.
        self._pool = ProcessPoolExecutor(
            min(_MOST_PROCESSES, os.cpu_count() or 1),
            multiprocessing.get_context("spawn"),
            initializer=die_with_parent,
        )

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, OracleVerdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        pairs = [(row["reference_answer"], row["response"]) for row in rows]
        return enumerate(self._pool.map(partial(_grade_in_time, ANSWER_SECONDS), pairs))


def _grade_in_time(seconds: float, pair: AnswerPair) -> OracleVerdict:
    """Grades in a fork of this process of the pool, which has no other threads."""
    # Before the fork: the first answer's time does not pay for it.
    load_grader()
    context = multiprocessing.get_context("fork")
    connection, other = context.Pipe(duplex=False)
    process = context.Process(target=_send_grade, args=(other, pair))
    process.start()
    other.close()
    try:
        if connection.poll(seconds):
            return connection.recv()
        return OracleVerdict(None, f"the answer took more than {seconds:g} s")
    except EOFError:
        return OracleVerdict(None, "the process that checked the answer died")
    finally:
        process.kill()
        process.join()
        connection.close()


def _send_grade(connection: Connection, pair: AnswerPair) -> None:
    die_with_parent()
    connection.send(load_grader()(pair))


@cache
def load_grader() -> Callable[[AnswerPair], OracleVerdict]:
    """Loads the library; returns the verdict on a pair."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns once in each process that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # A boxed answer counts before any other.
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def read(text: str) -> list[Any]:
        return list(parse(text, targets, parsing_timeout=None))

    def grade(pair: AnswerPair) -> OracleVerdict:
        reference, response = pair
        if reference is None:
            return OracleVerdict(None, "the prompt has no reference answer")
        # Bare LaTeX is read only inside delimiters; what they spoil ("\\$10") as it stands.
        boxed = f"\\boxed{{{reference}}}"
        delimited = any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\["))
        texts = (reference, boxed) if delimited else (boxed, reference)
        gold = read(texts[0]) or read(texts[1])
        if not gold:
            return OracleVerdict(None, f"the reference answer {reference[:80]!r} cannot be read")
        answer = read(response)
        is_right = bool(answer) and verify(gold, answer, timeout_seconds=None)
        return OracleVerdict(float(is_right), components={"answered": float(bool(answer))})

    return grade


def load(ctx: StageContext[ScoreParams]) -> MathVerify:
    """Prepares the comparison, which reads the responses alone."""
    return MathVerify()
