"""The ``python`` strategy: the two responses to compare by a function in a Python file."""

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages.contract.errors import UserError
from stages.harness.user_code import UserFunction
from stages.pair.select import Selection, ranked
from stages.tables.join import ScoredBatch


class UserStrategy(UserFunction):
    """Calls ``function(responses, seed, **settings)``.

    Each response is a mapping: its prompt's ``messages``, its text ``response``, its ``score``, the
    score's ``components`` by name, ``num_tokens`` and ``logprob``, its log-probability under the
    policy that sampled it.
    """

    noun = "pair strategy"
    section = "pair.python"
    signature = "(responses, seed, **settings) -> (i, j)"
    remedy = "fix the function, or pair.python.settings"

    def select_rows(self, batch: ScoredBatch, rows: Sequence[int], seed: int) -> Selection:
        """Places of two among rows of a batch, the better scored one first."""
        return self.select(_responses(batch, rows), seed)

    def select(self, responses: Sequence[Mapping[str, Any]], seed: int) -> Selection:
        """Places of the two responses, the better scored one first."""
        places = self.call(responses, seed)
        try:
            first, second = map(operator.index, places)
        except (TypeError, ValueError):
            first = second = -1
        exist = all(0 <= place < len(responses) for place in (first, second))
        if first == second or not exist:
            raise UserError(
                f"{self.title} returned {places!r} for {len(responses)} responses",
                f"return two different places from 0 to K − 1: {self.signature}",
            )
        return ranked([response["score"] for response in responses], first, second)


def _responses(batch: ScoredBatch, rows: Sequence[int]) -> list[dict[str, Any]]:
    names = ["messages", "response", "response_logprobs", "score", "components"]
    responses = batch.rows.select(names).take(pa.array(rows)).to_pylist()
    for response in responses:
        logprobs = response.pop("response_logprobs")
        response["components"] = dict(response["components"] or ())
        response["num_tokens"] = len(logprobs)
        response["logprob"] = sum(logprobs)
    return responses


def try_file(path: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Calls the function ``name`` of a file on made-up responses, every component of which is 0."""
    made_up = []
    for number, score in enumerate((0.25, 1.0, -0.5, 0.25)):
        response = {
            "messages": [{"role": "user", "content": "A trial prompt."}],
            "response": f"Trial response {number}.",
            "score": score,
            # The oracle's names for them are not known before it has scored.
            "components": defaultdict(float),
            "num_tokens": 3 + number,
            "logprob": -2.0 - number,
        }
        made_up.append(response)
    UserStrategy(path, name, settings).select(made_up, 1)
