"""Responses to score."""

from transformers import AutoTokenizer

from tests.stage_calls import response
from tests.tiny_models import WORDS


def response_rows():
    """Rows of a table of responses; those to one prompt stand together."""
    for index in range(10):
        question = " ".join(WORDS[: 1 + index % len(WORDS)])
        answer = {"reference_answer": str(index) if index % 2 else None}
        for sample in range(2):
            text = " ".join(WORDS[(index + sample) % 5 :])
            yield response(question, sample, text, **answer)


def conversation_ids(path, rows):
    """Token ids of each row's conversation and response, by the checkpoint's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    for row in rows:
        messages = [*row["messages"], {"role": "assistant", "content": row["response"]}]
        yield tokenizer.apply_chat_template(messages, return_dict=False)
