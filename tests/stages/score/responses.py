"""Responses to score."""

from stages.contract.digests import prompt_id
from tests.stage_calls import user_turn
from tests.tiny_models import WORDS


def response_rows(num_prompts=10, num_samples=2):
    """Rows of a table of responses; those to one prompt stand together."""
    for index in range(num_prompts):
        messages = user_turn(" ".join(WORDS[: 1 + index % len(WORDS)]))
        for sample in range(num_samples):
            yield {
                "prompt_id": prompt_id(messages),
                "sample_index": sample,
                "messages": messages,
                "reference_answer": str(index) if index % 2 else None,
                "prompt_token_ids": [1],
                "response_token_ids": [7, 2],
                "response_logprobs": [-1.0, -1.0],
                "response": " ".join(WORDS[(index + sample) % 5 :]),
                "finish_reason": "stop",
                "seed": 0,
            }
