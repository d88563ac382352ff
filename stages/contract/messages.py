"""Chat messages in a person's rows: one reader for prompts, preferences and conversations.

A message has a role and a text. Fields that carry anything else, such as a call of a tool, are
refused, in the row as well; other fields are not read.
"""

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from stages.contract.errors import UserError

Messages = list[dict[str, str]]
ROLES = ("system", "user", "assistant")
CARRIERS = ("tools", "tool_calls", "function_call", "images", "image", "videos", "audio", "audios")
"""Fields of a row or of a message that say more than its text."""
# Some exports write the list of messages as text into a column.
_WRITTEN_MESSAGES = re.compile(r"""\s*(?:\[\s*)?\{\s*["'](?:role|content|from)["']\s*:""")
_REMEDY = (
    'write messages as {"role": system | user | assistant, "content": text}, name another column, '
    "or remove the row (prepare does so with `invalid_rows: drop`)"
)


def read_messages(value: Any, name: str) -> Messages:
    """Reads text as one user turn, or a list of messages, which may be written as JSON.

    Args:
        value: Content of the column.
        name: The column, for errors.

    Raises:
        UserError: The value is neither, or a message carries more than text.
    """
    turns = listed_messages(value, name)
    if turns is None and isinstance(value, str):
        return [{"role": "user", "content": whole_text(value, name)}]
    if not turns:
        raise UserError(
            f"column {name!r} holds {type(value).__name__} without messages or text", _REMEDY
        )
    return [_read_message(turn, name) for turn in turns]


def with_system(messages: Messages, system: str | None) -> Messages:
    """The messages, after a system message if there is one to add and they have none."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_answer(value: Any, name: str) -> str:
    """Reads an answer: text, or a list of one assistant turn, which may be written as JSON.

    Raises:
        UserError: The value is neither.
    """
    turns = listed_messages(value, name)
    if turns is None and isinstance(value, str):
        return whole_text(value, name)
    messages = [_read_message(turn, name) for turn in turns or ()]
    if [message["role"] for message in messages] != ["assistant"]:
        raise UserError(f"column {name!r} holds neither text nor one assistant turn", _REMEDY)
    return messages[0]["content"]


def listed_messages(value: Any, name: str) -> list[Any] | None:
    """The list that a column holds or that its text spells in JSON; None for any other text.

    Raises:
        UserError: The text begins like messages and is not JSON.
    """
    if isinstance(value, list):
        return value
    if not isinstance(value, str) or not _WRITTEN_MESSAGES.match(value):
        return None
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"column {name!r} holds messages as text that is not JSON ({error}): "
            f"{reprlib.repr(value)}",
            "write the messages as a list, or as JSON by json.dumps",
        ) from error
    return parsed if isinstance(parsed, list) else [parsed]


def require_text_alone(fields: Mapping[str, Any], place: str = "the row") -> None:
    """Refuses a row or a message that carries more than text."""
    # Some exports write an empty list as text.
    carriers = [
        field
        for field in CARRIERS
        if fields.get(field) and fields[field] not in ("[]", "{}", "null")
    ]
    if carriers:
        raise UserError(
            f"{place} holds {', '.join(carriers)}, and only text is read",
            "write it as text, or remove the row (prepare does so with `invalid_rows: drop`)",
        )


def _read_message(turn: Any, name: str) -> dict[str, str]:
    fields = turn if isinstance(turn, Mapping) else {}
    require_text_alone(fields, f"a turn of column {name!r}")
    role = fields.get("role")
    content = fields.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise UserError(f"column {name!r} holds no message of text: {reprlib.repr(turn)}", _REMEDY)
    return {"role": role, "content": whole_text(content, name)}


def whole_text(text: str, name: str) -> str:
    """The text of a column; UserError if no tokenizer reads it: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"column {name!r} holds a lone surrogate ({text[error.start]!r})",
            "repair the encoding of the source",
        ) from error
    return text
