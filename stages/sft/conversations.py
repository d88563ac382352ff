"""Conversations of JSONL and Parquet files, read as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.contract.data_files import DATA_SUFFIXES, read_data_file
from stages.contract.errors import UserError
from stages.sft.params import SftParams

Conversation = list[dict[str, str]]

_FORMS = (
    'write rows as {"messages": [{"role": "user", "content": …}, {"role": "assistant", '
    '"content": …}]} or {"prompt": …, "response": …}'
)


def read_conversations(paths: Sequence[Path], params: SftParams) -> Iterator[Conversation]:
    """Yields the conversations of several files in order; each ends with an assistant turn.

    Raises:
        UserError: A file cannot be read, or a row is no such conversation; the message names it.
    """
    for path in paths:
        if path.suffix not in DATA_SUFFIXES or not path.is_file():
            raise UserError(
                f"{path} is not a data file",
                f"pass a file that ends in {' or '.join(DATA_SUFFIXES)}",
            )
        for place, row in read_data_file(path):
            yield _conversation(row, params, place)


def _conversation(row: dict[str, Any], params: SftParams, place: str) -> Conversation:
    turns = row.get(params.messages_column)
    if turns is None:
        turns = [
            {"role": "user", "content": row.get(params.prompt_column)},
            {"role": "assistant", "content": row.get(params.response_column)},
        ]
    if not isinstance(turns, list) or not all(_is_message(turn) for turn in turns):
        raise UserError(
            f"{place} has neither messages in {params.messages_column!r} nor text in "
            f"{params.prompt_column!r} and {params.response_column!r} (columns: {', '.join(row)})",
            f"{_FORMS}, or set sft.messages_column, sft.prompt_column and sft.response_column",
        )
    conversation = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    roles = [turn["role"] for turn in conversation]
    if roles[-1:] != ["assistant"] or not conversation[-1]["content"].strip():
        raise UserError(
            f"{place} does not end with an assistant turn that says something (roles: "
            f"{', '.join(roles) or 'none'})",
            "the last turn is what the policy learns to say: add it, or remove the row",
        )
    if "user" not in roles:
        raise UserError(f"{place} has no user turn (roles: {', '.join(roles)})", "add one")
    _require_unicode(conversation, place)
    return conversation


def _require_unicode(conversation: Conversation, place: str) -> None:
    """Refuses what no tokenizer reads."""
    for turn in conversation:
        try:
            turn["content"].encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{place} holds a lone surrogate ({error.object[error.start]!r})",
                "repair the encoding of the file",
            ) from error


def _is_message(turn: Any) -> bool:
    return (
        isinstance(turn, Mapping)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
    )
