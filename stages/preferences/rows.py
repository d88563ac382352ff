"""From a row of a preference data set to a prompt with two ranked responses. Pure."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.contract.data_files import is_message, lone_surrogate
from stages.contract.errors import UserError
from stages.preferences.params import PreferencesParams

Messages = list[dict[str, str]]

COMPLETIONS = "completions"
"""UltraFeedback's column of scored completions."""
_SCORE = "overall_score"
_UNSCORED = (1.0, 0.0)
_REMEDY = (
    'write rows as {"prompt": …, "chosen": …, "rejected": …}, each text or messages (TRL\'s '
    "preference format), or set preferences.prompt_column, chosen_column and rejected_column"
)


@dataclass(frozen=True)
class Preference:
    """A prompt with the preferred and the other response; scores are 1 and 0 if none are told."""

    messages: Messages
    chosen: str
    rejected: str
    scores: tuple[float, float]

    def __post_init__(self) -> None:
        texts = [*(each["content"] for each in self.messages), self.chosen, self.rejected]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise lone_surrogate("the row", error) from error

    @property
    def tie(self) -> bool:
        """True if nothing is preferred."""
        return self.chosen == self.rejected or self.scores[0] <= self.scores[1]


def read_preference(row: Mapping[str, Any], params: PreferencesParams) -> Preference | None:
    """Reads a row; None for UltraFeedback's rows with fewer than two scored completions.

    Raises:
        UserError: It holds no preference.
    """
    if row.get(COMPLETIONS) is not None:
        return _best_and_worst(row, params)
    given = row.get(params.prompt_column)
    sides = [_side(row, name, given) for name in (params.chosen_column, params.rejected_column)]
    (prompt, chosen), (other, rejected) = sides
    if prompt != other:
        raise UserError(
            f"{params.chosen_column} and {params.rejected_column} answer different prompts",
            "give both conversations the same turns before their last",
        )
    better, worse = _score(row.get("score_chosen")), _score(row.get("score_rejected"))
    scores = _UNSCORED if better is None or worse is None else (better, worse)
    return Preference(_with_system(prompt, params), chosen, rejected, scores)


def _best_and_worst(row: Mapping[str, Any], params: PreferencesParams) -> Preference | None:
    """The best scored completion against the worst; at a tie the first and the last of them."""
    prompt = row.get(params.prompt_column)
    if not isinstance(prompt, str):
        raise UserError(
            f"no prompt in column {params.prompt_column!r} (columns: {', '.join(row)})",
            "set preferences.prompt_column to `instruction`, UltraFeedback's column",
        )
    completions = row[COMPLETIONS]
    if not isinstance(completions, list) or not all(isinstance(c, Mapping) for c in completions):
        raise UserError(
            f"{COMPLETIONS!r} is no list of objects",
            f'write each completion as {{"response": …, "{_SCORE}": …}}, or rename the column',
        )
    scored = [
        (score, each["response"])
        for each in completions
        if (score := _score(each.get(_SCORE))) is not None and isinstance(each.get("response"), str)
    ]
    if len(scored) < 2:
        return None
    best = max(scored, key=lambda each: each[0])
    worst = min(reversed(scored), key=lambda each: each[0])
    messages = _with_system([{"role": "user", "content": prompt}], params)
    return Preference(messages, best[1], worst[1], (best[0], worst[0]))


def _score(value: Any) -> float | None:
    """A score as a number; None for one that is missing, as NaN is in tables."""
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _side(row: Mapping[str, Any], name: str, given: Any) -> tuple[Messages, str]:
    """The prompt and the response of one side."""
    value = row.get(name)
    if isinstance(value, str):
        if given is None:
            raise UserError(f"{name!r} is text, and the row has no prompt beside it", _REMEDY)
        return _messages(given, "the prompt"), value
    turns = _messages(value, name)
    if turns[-1]["role"] != "assistant":
        raise UserError(f"{name!r} does not end with an assistant turn", _REMEDY)
    # Whole conversations, or the response alone behind a prompt in a column of its own.
    before = turns[:-1] or (_messages(given, "the prompt") if given is not None else [])
    if not any(turn["role"] == "user" for turn in before):
        raise UserError(f"no user turn is before the response in {name!r}", _REMEDY)
    return before, turns[-1]["content"]


def _messages(value: Any, name: str) -> Messages:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not (isinstance(value, list) and value) or not all(map(is_message, value)):
        raise UserError(f"{name} is {type(value).__name__}, neither text nor messages", _REMEDY)
    return [{"role": turn["role"], "content": turn["content"]} for turn in value]


def _with_system(messages: Messages, params: PreferencesParams) -> Messages:
    if params.prompt_system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": params.prompt_system}, *messages]
