"""The ``python`` oracle: a function in a Python file."""

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.harness.user_code import UserFunction
from stages.score.oracle import OracleVerdict
from stages.score.params import ScoreParams

_TRIAL_PROMPT = {
    "messages": [{"role": "user", "content": "A trial prompt."}],
    "reference_answer": None,
}
_TRIAL_RESPONSES = ("A trial response.", "Another trial response,\nof two lines.")


class PythonOracle(UserFunction):
    """Calls ``function(prompts, responses, references)``.

    ``prompts`` are lists of messages (``role`` and ``content``), ``responses`` texts, and
    ``references`` reference answers or None. For each response it returns a number, None if it
    cannot score it, or a mapping with the number under ``score`` and named components.
    """

    noun = "oracle"
    section = "score.python"
    signature = "(prompts, responses, references) -> scores"
    remedy = "fix the function; a response without a score gets None"
    listed = Iterable

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        # The file's content, not its name: the key leaves the name out.
        self.identity = f"python:{name}@{sha256_file(path)[:16]}"

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, OracleVerdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        # Copies: other oracles read the rows, too.
        scores = self.call(
            [[dict(message) for message in row["messages"]] for row in rows],
            [row["response"] for row in rows],
            [row["reference_answer"] for row in rows],
        )
        one_each = f"return a list of one score per response: {self.signature}"
        if not isinstance(scores, list):
            kind = type(scores).__name__
            raise UserError(f"{self.title} returned {kind}, not a sequence of scores", one_each)
        if len(scores) != len(rows):
            raise UserError(
                f"{self.title} returned {len(scores)} scores for {len(rows)} responses", one_each
            )
        for place, (row, score) in enumerate(zip(rows, scores, strict=True)):
            yield place, self._verdict(row, score)

    def _verdict(self, row: Mapping[str, Any], score: Any) -> OracleVerdict:
        if score is None:
            return OracleVerdict(None, f"{self.title} returned None")
        values = score if isinstance(score, Mapping) else {"score": score}
        if "score" not in values:
            raise UserError(
                f"{self.title} returned {score!r} for {_place(row)}, a mapping without 'score'",
                "put the number under 'score', components under other names",
            )
        checked = {}
        for name, value in values.items():
            checked[str(name)] = self._number(row, name, value)
        return OracleVerdict(checked.pop("score"), components=checked)

    def _number(self, row: Mapping[str, Any], name: str, value: Any) -> float:
        with suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, str) and math.isfinite(float(value)):
                return float(value)
        noun = name if name == "score" else f"component {name!r}"
        raise UserError(
            f"{self.title} returned {noun} {reprlib.repr(value)} for {_place(row)}",
            "return a finite number, or None for a response that cannot be scored",
        )


def _place(row: Mapping[str, Any]) -> str:
    return (
        f"prompt {row['prompt_id']}, sample {row['sample_index']} "
        f"(response: {row['response'][:80]!r})"
    )


def load(ctx: StageContext[ScoreParams]) -> PythonOracle:
    """Loads the function named by the parameters from the file given as input ``code``."""
    return PythonOracle(ctx.path("code"), ctx.params.python.function)


def try_file(path: Path, name: str, prompts: Sequence[Mapping[str, Any]]) -> None:
    """Calls the function ``name`` of a file on responses to prompts of the run.

    Without prompts it is called on a made-up one, and may raise what it likes: the prompt may lack
    what the function needs.
    """
    oracle = PythonOracle(path, name)
    rows = [
        {"prompt_id": f"trial-{number}", "sample_index": index, "response": response, **prompt}
        for number, prompt in enumerate(prompts or [_TRIAL_PROMPT])
        for index, response in enumerate(_TRIAL_RESPONSES)
    ]
    try:
        list(oracle.score(rows))
    except UserError as error:
        # An exception of the function is the cause of the error.
        if prompts or error.__cause__ is None:
            raise
