"""Prompts and settings of small runs of the generate stage."""

from tests.tiny_models import WORDS

TEXTS = [" ".join(WORDS[: 1 + index % 11]) + f" {WORDS[index // 11]}" for index in range(23)]
PARAMS = {
    "num_samples": 3,
    "max_new_tokens": 12,
    "dtype": "float32",
    "transformers": {"batch_size": 16},
}
