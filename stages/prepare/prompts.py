"""From one row of a source to one prompt. Pure."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from stages.contract.errors import UserError
from stages.contract.messages import (
    Messages,
    listed_messages,
    read_messages,
    require_text_alone,
    whole_text,
    with_system,
)
from stages.prepare.params import PrepareParams

_DEFAULT_COLUMNS = (PrepareParams().messages_column, PrepareParams().prompt_column)


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer: its last turn is the user's."""

    messages: Messages
    reference: str | None
    """Reference answer, if the source has one."""
    cut: bool
    """True if the source went on with assistant turns, which are not part of the prompt."""


def read_prompt(row: Mapping[str, Any], params: PrepareParams, columns: Collection[str]) -> Prompt:
    """Turns a source's row into a prompt.

    Trailing assistant turns are cut off, so that supervised data can serve as prompts. Errors show
    all columns of the source, or the row's if they are empty.
    """
    require_text_alone(row)
    shown = ", ".join(columns or row) or "none"
    messages = _messages(row, params, shown)
    length = len(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    cut = len(messages) < length
    if not messages or messages[-1]["role"] != "user":
        raise UserError(
            "the prompt has no user turn at its end",
            "end every prompt with a user message, or set `invalid_rows: drop`",
        )
    if not messages[-1]["content"].strip():
        raise UserError(
            "the prompt's last user turn is empty",
            "fill it, remove the row, or set `invalid_rows: drop`",
        )
    reference = _reference(row, params, shown)
    return Prompt(with_system(messages, params.system_prompt), reference, cut)


def _messages(row: Mapping[str, Any], params: PrepareParams, shown: str) -> Messages:
    names = (params.messages_column, params.prompt_column)
    if names == _DEFAULT_COLUMNS:
        # TRL's preferences: a `prompt` in its own column may be the conversation's last turn alone.
        chosen = listed_messages(row.get("chosen"), "chosen") or ()
        if len(chosen) > 1:
            return read_messages(chosen, "chosen")
    for name in names:
        if row.get(name) is not None:
            return read_messages(row[name], name)
    raise UserError(
        f"no prompt in column {names[0]!r} or {names[1]!r} (columns: {shown})",
        "set `messages_column` or `prompt_column` to the column that holds the prompts",
    )


def _lookup(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field in a column of structs; None if there is none."""
    if name in row:
        return row[name]
    column, _, inner = name.partition(".")
    value = row.get(column) if inner else None
    return _lookup(value, inner) if isinstance(value, Mapping) else None


def _reference(row: Mapping[str, Any], params: PrepareParams, shown: str) -> str | None:
    if params.reference_columns:
        missing = [name for name in params.reference_columns if name not in row]
        if missing:
            raise UserError(
                f"no column {missing[0]!r} of `reference_columns` (columns: {shown})",
                "correct `reference_columns`",
            )
        kept = {name: row[name] for name in params.reference_columns}
        try:
            return json.dumps(kept, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"`reference_columns`: {error}", "convert the column to text or numbers"
            ) from error
    value = _lookup(row, params.reference_column)
    if params.reference_item is not None and isinstance(value, list):
        if params.reference_item >= len(value):
            raise UserError(
                f"the reference answer has {len(value)} items, and no item {params.reference_item}",
                "correct `reference_item`, or set `invalid_rows: drop`",
            )
        value = value[params.reference_item]
    if isinstance(value, str):
        return whole_text(value, params.reference_column)
    return None if value is None else _number_text(value)


def _number_text(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(
            f"the reference answer is {value}, which tables hold where a number is missing",
            "write null where a row has none, or set `invalid_rows: drop`",
        )
    if isinstance(value, float) and value.is_integer():
        # A column of numbers with gaps has floats where a person wrote integers.
        return str(int(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise UserError(
        f"the reference answer is {type(value).__name__}, not text or a number",
        "point `reference_column` at a text column",
    )
