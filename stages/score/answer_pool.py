"""Answers checked against the prompts' reference answers, in processes with a time limit.

Libraries bound their work by SIGALRM if at all, which only the main thread can take and which
cannot interrupt a single long operation (``9^{9^{9}}`` is one). So they work in processes that are
killed when they take too long: the stage's signals stay its own.
"""

import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stages.contract.errors import UserError
from stages.modeling.process_pool import CRASH, TIMEOUT, ProcessPool
from stages.score.oracle import Verdict
from stages.score.params import AnswerSettings

Check = Callable[[tuple[str | None, str]], Verdict]
"""Verdict on a reference answer, if the prompt has one, and a response."""


class AnswerPool:
    """Checks each response against its prompt's reference answer.

    ``load`` loads the library in a process and returns the check; see
    :class:`stages.modeling.process_pool.ProcessPool`. The remedy is for a library that lacks.
    """

    def __init__(
        self,
        oracle: str,
        library: str,
        remedy: str,
        load: Callable[[], Check],
        settings: AnswerSettings,
    ) -> None:
        try:
            self.identity = f"{oracle}:{importlib.metadata.version(library)}"
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"the oracle {oracle} needs the library {library}, which is not installed", remedy
            ) from None
        self._timeout_seconds = settings.timeout_seconds
        places: list[dict[str, str]] = [{}] * min(settings.processes, os.cpu_count() or 1)
        self._pool: ProcessPool[Any, Any] = ProcessPool(load, places, settings.timeout_seconds)
        self.close = self._pool.close

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        pairs = ((row["reference_answer"], row["response"]) for row in rows)
        for place, found in self._pool.stream(pairs):
            if found == TIMEOUT:
                why = f"the answer took more than {self._timeout_seconds:g} s"
                yield place, Verdict(None, why)
            elif found == CRASH:
                yield place, Verdict(None, "the process that checked the answer died")
            else:
                yield place, found
