"""From a row of supervised data to a conversation. Pure."""

from collections.abc import Mapping
from typing import Any

from stages.contract.errors import UserError
from stages.contract.messages import Messages, read_answer, read_messages, require_text_alone

_FORMS = (
    'write rows as {"messages": [{"role": "user", "content": …}, {"role": "assistant", '
    '"content": …}]} or {"prompt": …, "response": …}'
)


def read_conversation(row: Mapping[str, Any]) -> Messages:
    """Reads a row; UserError if it holds no conversation that ends with an assistant turn."""
    require_text_alone(row)
    turns = row.get("messages")
    prompt = row.get("prompt")
    response = row.get("response")
    if turns is not None:
        conversation = read_messages(turns, "messages")
    elif None not in (prompt, response):
        answer = read_answer(response, "response")
        conversation = read_messages(prompt, "prompt")
        conversation.append({"role": "assistant", "content": answer})
    else:
        raise UserError(
            f"the row has neither messages nor a prompt and a response (columns: {', '.join(row)})",
            _FORMS,
        )
    roles = [turn["role"] for turn in conversation]
    if roles[-1] != "assistant" or not conversation[-1]["content"].strip():
        raise UserError(
            f"the conversation does not end with an assistant turn that says something (roles: "
            f"{', '.join(roles)})",
            "the last turn is what the policy learns to say: add it, or remove the row",
        )
    if "user" not in roles:
        raise UserError("the conversation has no user turn", "add one")
    return conversation
