"""Forms of messages in rows, read alike by prepare, preferences and sft."""

import json

import pytest

from stages.contract.errors import UserError
from stages.contract.messages import read_answer, read_messages

USER = {"role": "user", "content": "red"}
ANSWER = {"role": "assistant", "content": "blue"}
CALL = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ("red", [USER]),
        ([USER], [USER]),
        (json.dumps([USER, ANSWER]), [USER, ANSWER]),
        (" " + json.dumps([USER], indent=1), [USER]),
        (json.dumps(USER), [USER]),
        ("[1] is a footnote", [{"role": "user", "content": "[1] is a footnote"}]),
        ('{"a": 1} is JSON', [{"role": "user", "content": '{"a": 1} is JSON'}]),
    ],
)
def test_messages_are_read_as_a_list_and_as_json(value, messages):
    assert read_messages(value, "prompt") == messages


def test_an_answer_is_text_or_one_assistant_turn():
    for value in ("blue", [ANSWER], json.dumps([ANSWER])):
        assert read_answer(value, "chosen") == "blue"
    for value in (json.dumps([USER, ANSWER]), [USER], [], None, 3):
        with pytest.raises(UserError, match="'chosen'"):
            read_answer(value, "chosen")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (str([USER]), "not JSON"),
        ('[{"role": "user", "content": "re', "not JSON"),
        ([{"from": "human", "value": "red"}], "no message of text"),
        (json.dumps([{"from": "human", "value": "red"}]), "no message of text"),
        ([json.dumps(USER)], "no message of text"),
        ([USER, {**ANSWER, "content": "", "tool_calls": CALL}, USER], "tool_calls"),
        ([USER, {**ANSWER, "content": None, "tool_calls": CALL}, USER], "tool_calls"),
        ([USER, {**ANSWER, "function_call": {"name": "weather"}}], "function_call"),
        ([{**USER, "images": ["a.png"]}], "images"),
        ([{"role": "tool", "content": "42"}, USER], "no message of text"),
        ([{"role": "developer", "content": "red"}, USER], "no message of text"),
        ([{"role": "user", "content": [{"type": "text", "text": "red"}]}], "no message of text"),
        ([], "without messages"),
        (3, "int"),
    ],
)
def test_rows_that_would_lose_something_are_refused(value, word):
    with pytest.raises(UserError, match=f"'messages'.*{word}") as refused:
        read_messages(value, "messages")
    assert refused.value.remedy
