"""Grading of mathematical answers in processes of their own, and votes for final answers.

The ``math-verify`` library bounds its work by SIGALRM, which only the main thread can take and
which cannot interrupt a single long operation (``9^{9^{9}}`` is one). So its own limits are off,
and it works in processes that are killed when they take too long: the stage's signals stay its own.
"""

from __future__ import annotations

import importlib
import logging
import math
import multiprocessing
import signal
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

Grade = Literal["correct", "wrong", "no answer", "unreadable reference", "timeout", "crash"]
Task = Literal["grade", "same"]
"""Against a reference answer, or the final answers of two responses with each other."""
# The library's import takes seconds on a busy machine; more than this means that it hangs.
_START_SECONDS = 300.0
_READY = "ready"


def grade(reference: str, response: str) -> Grade:
    """Compares the final answer of a response with the reference answer.

    A boxed answer counts before any other. Without time limit: call it in a :class:`GraderPool`.

    Args:
        reference: The right answer, in LaTeX or plain; without delimiters, or in them.
        response: Text that ends in an answer.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    # Bare LaTeX is read only inside delimiters; what they spoil ("\$10") is read as it stands.
    boxed = f"\\boxed{{{reference}}}"
    delimited = any(each in reference for each in ("$", "\\boxed", "\\(", "\\["))
    for text in (reference, boxed) if delimited else (boxed, reference):
        gold = parse(text, targets, parsing_timeout=None)
        if gold:
            break
    else:
        return "unreadable reference"
    answer = parse(response, targets, parsing_timeout=None)
    if not answer:
        return "no answer"
    return "correct" if verify(gold, answer, timeout_seconds=None) else "wrong"


def same_answer(first: str, second: str) -> Grade:
    """Compares the final answers of two responses: `correct` where they are equal, else `wrong`.

    Args:
        first: Text that ends in an answer.
        second: The same.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    one, other = (parse(text, targets, parsing_timeout=None) for text in (first, second))
    if not (one and other):
        return "no answer"
    return "correct" if verify(one, other, timeout_seconds=None) else "wrong"


_TASKS = {"grade": grade, "same": same_answer}


class GraderPool:
    """Grades on several processes, each answer within a time limit.

    Args:
        size: Number of processes.
        timeout_seconds: Wall time for one answer.
    """

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._size = size
        self._workers: list[_Worker] = []

    def grade(self, pairs: Sequence[tuple[str, str]], task: Task = "grade") -> list[Grade]:
        """Grades pairs of reference and response, or of two responses (`same`), in order."""
        try:
            return self._grade(pairs, task)
        except BaseException:
            # Also when the stage is asked to stop: no process may be left behind at work.
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes; the next call of :meth:`grade` starts others."""
        while self._workers:
            self._workers.pop().kill()

    def _grade(self, pairs: Sequence[tuple[str, str]], task: Task) -> list[Grade]:
        grades: dict[int, Grade] = {}
        pending = deque(range(len(pairs)))
        while len(self._workers) < min(self._size, len(pairs)):
            self._workers.append(_Worker(self._timeout_seconds))
        while len(grades) < len(pairs):
            for worker in self._workers:
                if worker.index is None and pending:
                    following = pending.popleft()
                    worker.give(following, task, pairs[following])
            busy = {each.connection: each for each in self._workers if each.index is not None}
            patience = min(each.deadline for each in busy.values()) - time.monotonic()
            ready = set(wait(list(busy), timeout=max(0.0, patience)))
            for connection, worker in busy.items():
                index = worker.index
                assert index is not None
                # Asked again: to start another process in a place takes seconds, in which an answer
                # may have come and its time limit passed.
                if connection in ready or connection.poll():
                    grades[index] = worker.take()
                elif time.monotonic() >= worker.deadline:
                    grades[index] = "timeout"
                else:
                    continue
                if grades[index] in ("timeout", "crash"):
                    worker.kill()
                    self._workers[self._workers.index(worker)] = _Worker(self._timeout_seconds)
        return [grades[index] for index in range(len(pairs))]


class _Worker:
    """A process that grades one answer after the other; ``index`` is what it works at."""

    def __init__(self, timeout_seconds: float) -> None:
        # Not forked: the parent may hold threads and a GPU.
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, timeout_seconds), name="grader", daemon=True
        )
        self._process.start()
        other.close()
        self._timeout_seconds = timeout_seconds
        self.index: int | None = None
        self.deadline = math.inf
        if not self.connection.poll(_START_SECONDS) or self._receive() != _READY:
            self.kill()
            raise OSError("a process that grades answers did not start")

    def give(self, index: int, task: Task, pair: tuple[str, str]) -> None:
        self.index = index
        self.deadline = time.monotonic() + self._timeout_seconds
        self.connection.send((task, *pair))

    def take(self) -> Grade:
        """The grade that has come."""
        self.index = None
        return self._receive() or "crash"

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, timeout_seconds: float) -> None:
    """Grades what comes until the other end is closed."""
    # It warns once in each process that its own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Loaded here, so that the first answer's time limit does not pay for it.
    importlib.import_module("math_verify")
    connection.send(_READY)
    while True:
        try:
            task, first, second = connection.recv()
        except EOFError:
            return
        # Should the parent be killed meanwhile, SIGALRM's default action ends this process too.
        signal.alarm(math.ceil(2 * timeout_seconds) + 1)
        connection.send(_TASKS[task](first, second))
        signal.alarm(0)


def count_votes(
    pool: GraderPool, responses: Sequence[tuple[str, str]], grades: Sequence[Grade]
) -> list[int]:
    """Counts for each response the samples of its prompt with an equal final answer, itself too.

    Correct answers all equal the reference answer, and so each other. Wrong ones are compared by
    math-verify: the first that has no group yet with all others that have none. A comparison that
    takes too long counts as unequal.

    Args:
        pool: The processes that compare.
        responses: Prompt id and text of each response; a prompt's stand together.
        grades: Their grades against the reference answer.

    Returns:
        Votes in the same order; 0 for a response without an answer.
    """
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    open_places: dict[str, list[int]] = defaultdict(list)
    for place, ((prompt, _), grade) in enumerate(zip(responses, grades, strict=True)):
        if grade == "correct":
            groups[prompt, -1].append(place)
        elif grade == "wrong":
            open_places[prompt].append(place)
    while open_places:
        firsts = {prompt: places[0] for prompt, places in open_places.items()}
        asked = [
            (firsts[prompt], place)
            for prompt, places in open_places.items()
            for place in places[1:]
        ]
        same = _compare(pool, responses, asked)
        left: dict[str, list[int]] = defaultdict(list)
        for prompt, first in firsts.items():
            groups[prompt, first].append(first)
        for first, place in asked:
            prompt = responses[place][0]
            if same[first, place]:
                groups[prompt, first].append(place)
            else:
                left[prompt].append(place)
        open_places = left
    votes = [0] * len(responses)
    for places in groups.values():
        for place in places:
            votes[place] = len(places)
    return votes


def _compare(
    pool: GraderPool,
    responses: Sequence[tuple[str, str]],
    asked: Sequence[tuple[int, int]],
) -> dict[tuple[int, int], bool]:
    """A flag for each pair of places: the answers are equal; the same text is so unasked."""
    texts = {pair: (responses[pair[0]][1], responses[pair[1]][1]) for pair in asked}
    different = sorted({each for each in texts.values() if each[0] != each[1]})
    found = dict(zip(different, pool.grade(different, "same"), strict=True))
    return {
        pair: one == other or found[one, other] == "correct" for pair, (one, other) in texts.items()
    }
