"""From a row of a preference data set to a prompt with two ranked responses. Pure."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.contract.errors import UserError
from stages.contract.messages import (
    Messages,
    listed_messages,
    read_answer,
    read_messages,
    require_text_alone,
    with_system,
)
from stages.preferences.params import PreferencesParams

_REMEDY = (
    'write rows as {"prompt": …, "chosen": …, "rejected": …}, each text or messages (TRL\'s '
    "preference format), or set `prepare.invalid_rows: drop`"
)


@dataclass(frozen=True)
class Preference:
    """A prompt with the preferred and the other response; without scores these are 1 and 0."""

    messages: Messages
    chosen: str
    rejected: str
    scores: tuple[float, float]


def read_preference(row: Mapping[str, Any], params: PreferencesParams) -> Preference:
    """Reads a row; UserError if it holds no preference."""
    require_text_alone(row)
    prompt, chosen = _side(row, "chosen")
    other, rejected = _side(row, "rejected")
    if prompt != other:
        raise UserError(
            "chosen and rejected answer different prompts",
            "give both conversations the same turns before their last",
        )
    # Another one would count as a prompt that the run does not have: its prompts all end so.
    if prompt[-1]["role"] != "user":
        raise UserError(
            "no user turn is right before the responses",
            "end the prompt with a user turn, or set `prepare.invalid_rows: drop`",
        )
    # A pairs.parquet has the second name.
    better = _score(row.get("score_chosen", row.get("chosen_score")))
    worse = _score(row.get("score_rejected", row.get("rejected_score")))
    scores = (1.0, 0.0) if better is None or worse is None else (better, worse)
    return Preference(with_system(prompt, params.prompt_system), chosen, rejected, scores)


def _score(value: Any) -> float | None:
    """A score as a number; None for one that is missing, as NaN is in tables."""
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _side(row: Mapping[str, Any], name: str) -> tuple[Messages, str]:
    """The prompt and the response of one side."""
    value = row.get(name)
    if value is None:
        raise UserError(f"no value in column {name!r} (columns: {', '.join(row)})", _REMEDY)
    turns = listed_messages(value, name)
    # An answer alone, behind a prompt in its own column; otherwise a whole conversation.
    if turns is None or len(turns) == 1:
        given = row.get("prompt")
        if given is None:
            raise UserError(f"{name!r} is one turn, and the row has no prompt", _REMEDY)
        return read_messages(given, "prompt"), read_answer(value, name)
    *prompt, answer = read_messages(turns, name)
    if answer["role"] != "assistant":
        raise UserError(f"{name!r} does not end with an assistant turn", _REMEDY)
    return prompt, answer["content"]
