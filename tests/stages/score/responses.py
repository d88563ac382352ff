"""Responses to score."""

from tests.stage_calls import response
from tests.tiny_models import WORDS


def response_rows(num_prompts=10, num_samples=2):
    """Rows of a table of responses; those to one prompt stand together."""
    for index in range(num_prompts):
        question = " ".join(WORDS[: 1 + index % len(WORDS)])
        answer = {"reference_answer": str(index) if index % 2 else None}
        for sample in range(num_samples):
            text = " ".join(WORDS[(index + sample) % 5 :])
            yield response(question, sample, text, **answer)
