"""Scores known so far, kept in files for a retry; their statistics; whole prompts as batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError
from stages.contract.sealed import find_whole
from stages.contract.tables import RESPONSES, SCORES, publish_table, read_rows
from stages.score.oracle import Oracle, Verdict

COLUMNS = ("prompt_id", "sample_index", "messages", "reference_answer", "response")
# Between two saves: a kill costs so many seconds of answers that were paid for.
_SAVE_SECONDS = 5.0

Row = dict[str, Any]


def read_prompts(
    responses: Path, opponents: Path | None, batch_rows: int
) -> Iterator[tuple[int, list[Row]]]:
    """Yields (number of the first row, rows): whole prompts, at least ``batch_rows`` rows.

    Args:
        responses: A RESPONSES table.
        opponents: Another one with the same rows, whose texts are put beside as ``opponent``.
        batch_rows: Rows after which a batch ends with the prompt.

    Raises:
        UserError: The two tables do not have the same rows.
    """
    rows: list[Row] = []
    first = 0
    for row in _with_opponents(responses, opponents):
        if len(rows) >= batch_rows and row["prompt_id"] != rows[-1]["prompt_id"]:
            yield first, rows
            first += len(rows)
            rows = []
        rows.append(row)
    if rows:
        yield first, rows


def _with_opponents(responses: Path, opponents: Path | None) -> Iterator[Row]:
    rows = read_rows(responses, RESPONSES, columns=COLUMNS)
    if opponents is None:
        yield from rows
        return
    others = read_rows(opponents, RESPONSES, columns=COLUMNS)
    for row in rows:
        other = next(others, {})
        for name in ("prompt_id", "sample_index"):
            if row[name] != other.get(name):
                raise UserError(
                    f"the opponents' row for prompt {row['prompt_id']}, sample "
                    f"{row['sample_index']} has {name} {other.get(name)!r}",
                    "sample both on the same prompts, with the same number of samples and shards",
                )
        yield row | {"opponent": other["response"]}


@dataclass(frozen=True)
class Answers:
    """The scores of some consecutive responses, in a file that holds those known so far.

    Attributes:
        path: The file. Rows are found in it by prompt and sample. The name of a batch's file holds
            the batch's bounds, so that batches of another size have files of their own.
    """

    path: Path

    def known(self, rows: Sequence[Row], warn: Callable[[str], None]) -> dict[int, Row]:
        """The rows of SCORES that are known already, by their place in ``rows``.

        Prompts count as a whole: some oracles look at all responses of one. One with a response
        that has no score is asked about again. ``warn`` is told of a damaged file.
        """
        if not find_whole(self.path, warn):
            return {}
        found = {
            (each["prompt_id"], each["sample_index"]): each
            for each in read_rows(self.path, SCORES)
            if each["score"] is not None
        }
        known: dict[int, Row] = {}
        for start, stop in pairwise(prompt_starts(rows)):
            keys = [(row["prompt_id"], row["sample_index"]) for row in rows[start:stop]]
            if all(key in found for key in keys):
                known |= {start + place: found[key] for place, key in enumerate(keys)}
        return known

    def ask(
        self, oracle: Oracle, rows: Sequence[Row], known: dict[int, Row]
    ) -> Generator[tuple[int, Verdict], None, None]:
        """Asks for what is not known yet, and keeps it as it comes; to be closed by the caller.

        Args:
            oracle: The oracle.
            rows: Rows of the responses table.
            known: Rows of SCORES by place, to which the answers are added.

        Yields:
            (place in ``rows``, verdict) of each new answer.
        """
        places = [place for place in range(len(rows)) if place not in known]
        if not places:
            return
        pacer = Pacer()
        num_known = len(known)
        try:
            for index, verdict in oracle.score([rows[place] for place in places]):
                place = places[index]
                known[place] = _to_row(rows[place], verdict, oracle.identity)
                if pacer.is_due():
                    self.save(known)
                yield place, verdict
        finally:
            # Also when the oracle fails or the stage is stopped: answers are not to be paid for
            # twice.
            if len(known) > num_known:
                self.save(known)

    def save(self, answers: Mapping[int, Row]) -> None:
        """Writes what is known, in the order of the rows."""
        publish_table(self.path, SCORES, [answers[place] for place in sorted(answers)])


def _to_row(row: Row, verdict: Verdict, identity: str) -> Row:
    return {
        "prompt_id": row["prompt_id"],
        "sample_index": row["sample_index"],
        "score": verdict.score,
        "error": verdict.error,
        "components": list(verdict.components.items()),
        "oracle": identity,
    }


def prompt_starts(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """First row of each prompt, and the number of rows."""
    changes = [
        place
        for place in range(1, len(rows))
        if rows[place]["prompt_id"] != rows[place - 1]["prompt_id"]
    ]
    return [0, *changes, len(rows)] if rows else [0]


class Pacer:
    """Tells when it is time to save again."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SAVE_SECONDS

    def is_due(self) -> bool:
        """True once enough time has passed since it was last due."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _SAVE_SECONDS
        return True


@dataclass
class Statistics:
    """Mean and spread of a stream of scores, by Welford's update."""

    num_scored: int = 0
    num_null: int = 0
    first_error: str | None = None
    mean: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    _squares: float = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes one more row of scores in."""
        score = row["score"]
        if score is None:
            self.num_null += 1
            self.first_error = self.first_error or row["error"]
            return
        self.num_scored += 1
        distance = score - self.mean
        self.mean += distance / self.num_scored
        self._squares += distance * (score - self.mean)
        self.lowest = min(self.lowest, score)
        self.highest = max(self.highest, score)

    def summary(self) -> dict[str, Any]:
        """The statistics as JSON values; those of no score at all are null."""
        some = self.num_scored > 0
        return {
            "responses": self.num_scored + self.num_null,
            "null_scores": self.num_null,
            "mean": self.mean if some else None,
            "min": self.lowest if some else None,
            "max": self.highest if some else None,
            "std": math.sqrt(self._squares / self.num_scored) if some else None,
        }
