"""The ``python`` oracle: a function in a file of the user's; and its trial.

``python -m stages.score.python_function CODE FUNCTION CERTAINTY ROWS.json`` loads the function in
the score stage's environment and calls it once on the rows, so that a run learns before it pays for
anything that its oracle cannot work: it ends as a stage does. With the certainty ``made-up``, not
``read``, the rows are no prompts of the run, and an error that the function raises on them tells
nothing. A trial that comes to its end says so, and whether it got the same reward for all responses
to each prompt: an oracle may end the process.
"""

import json
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.harness.context import StageContext
from stages.harness.program import run_program
from stages.harness.user_code import load_function, user_code
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams

_TRIED = "tried"
_ALIKE = "tried alike"
_SIGNATURE = "(prompts, responses, references) -> scores"


@dataclass(frozen=True)
class PythonOracle:
    """Calls ``function(prompts, responses, references)``.

    ``prompts`` are lists of messages (``role`` and ``content``), ``responses`` texts, and
    ``references`` reference answers or None. For each response it returns a number, None if it
    cannot score it, or a mapping with the number under ``score`` and named components beside it.
    """

    function: Callable[..., Any]
    identity: str
    name: str

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        scores = self._call(rows)
        if len(scores) != len(rows):
            raise UserError(
                f"{self.name} returned {len(scores)} scores for {len(rows)} responses",
                f"return one score per response: {_SIGNATURE}",
            )
        for place, (row, score) in enumerate(zip(rows, scores, strict=True)):
            yield place, self._verdict(row, score)

    def _call(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        with user_code(self.name, "fix the function; a response without a score gets None"):
            scores = self.function(
                [row["messages"] for row in rows],
                [row["response"] for row in rows],
                [row["reference_answer"] for row in rows],
            )
            if isinstance(scores, Iterable):
                # Within the block: a generator runs only now.
                return list(scores)
        raise UserError(
            f"{self.name} returned {type(scores).__name__}, not a sequence of scores",
            f"return one score per response: {_SIGNATURE}",
        )

    def _verdict(self, row: Mapping[str, Any], score: Any) -> Verdict:
        if score is None:
            return Verdict(None, f"{self.name} returned None")
        values = score if isinstance(score, Mapping) else {"score": score}
        if "score" not in values:
            raise UserError(
                f"{self.name} returned {score!r} for {_place(row)}, a mapping without 'score'",
                "put the number under 'score', components under names of their own",
            )
        checked = {str(name): self._number(row, name, value) for name, value in values.items()}
        return Verdict(checked.pop("score"), components=checked)

    def _number(self, row: Mapping[str, Any], name: str, value: Any) -> float:
        number = _to_float(value)
        if not math.isfinite(number):
            raise UserError(
                f"{self.name} returned {name} {reprlib.repr(value)} for {_place(row)}",
                "return a finite number, or None for a response that cannot be scored",
            )
        return number


def _place(row: Mapping[str, Any]) -> str:
    return (
        f"prompt {row['prompt_id']}, sample {row['sample_index']} "
        f"(response: {row['response'][:80]!r})"
    )


def _to_float(value: Any) -> float:
    """A number of any library as a float; NaN if ``value`` is none."""
    if isinstance(value, str):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
    except OverflowError:
        return math.inf


def load(ctx: StageContext[ScoreParams]) -> PythonOracle:
    """Loads the function named by the parameters from the file given as input ``code``."""
    return load_file(ctx.path("code"), ctx.params.python.function)


def load_file(path: Path, name: str) -> PythonOracle:
    """Loads the function ``name`` of a file."""
    function = load_function(path, name, setting="score.python.function", signature=_SIGNATURE)
    # The file's content, not its name: the name is no part of the key.
    identity = f"python:{name}@{sha256_file(path)[:16]}"
    return PythonOracle(function, identity, f"the oracle {path.name}:{name}")


def _try_oracle(events: Emitter) -> None:
    """Tries the oracle that the command line names."""
    code, function, certainty, rows = sys.argv[1:]
    oracle = load_file(Path(code), function)
    asked = json.loads(Path(rows).read_text())
    found = set()
    try:
        for place, verdict in oracle.score(asked):
            found.add((asked[place]["prompt_id"], verdict.score))
    except UserError as error:
        # What the function raised is the cause of the error.
        if certainty == "read" or error.__cause__ is None:
            raise
    is_known = certainty == "read" and all(score is not None for _, score in found)
    is_alike = is_known and len(found) == len({row["prompt_id"] for row in asked})
    events.info(_ALIKE if is_alike else _TRIED)


if __name__ == "__main__":
    run_program(_try_oracle)
