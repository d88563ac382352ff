"""Answers checked against the prompts' reference answers, in processes with a time limit.

Libraries bound their work by SIGALRM if at all, which only the main thread can take and which
cannot interrupt a single long operation (``9^{9^{9}}`` is one). So they work in processes that are
killed when they take too long: the stage's signals stay its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from stages.modeling.process_pool import CRASH, TIMEOUT, ProcessPool
from stages.score.oracle import Verdict
from stages.score.params import AnswerSettings

Check = Callable[[tuple[str, str]], Verdict]
"""Verdict on a reference answer and a response."""


class AnswerPool:
    """Checks each response against its prompt's reference answer.

    Args:
        identity: The library and its version.
        load: Loads the library in a process and returns the check; see
            :class:`stages.modeling.process_pool.ProcessPool`.
        settings: Number of processes, and wall time for one answer.
    """

    def __init__(self, identity: str, load: Callable[[], Check], settings: AnswerSettings) -> None:
        self.identity = identity
        self._timeout_seconds = settings.timeout_seconds
        self._pool: ProcessPool[tuple[str, str], Verdict | Literal["timeout", "crash"]]
        size = min(settings.processes, os.cpu_count() or 1)
        self._pool = ProcessPool(load, [{}] * size, timeout_seconds=settings.timeout_seconds)
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
            if found == TIMEOUT:
                why = f"the answer took more than {self._timeout_seconds:g} s"
                found = Verdict(None, why)
            elif found == CRASH:
                found = Verdict(None, "the process that checked the answer died")
            assert isinstance(found, Verdict)
            yield places[number], found
