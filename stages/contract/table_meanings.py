"""Meanings of the columns of :mod:`stages.contract.tables`, for the documentation.

They are not metadata of the schemas, which are part of every file's bytes and so of its digest.
"""

from __future__ import annotations

from collections.abc import Mapping

_ID = "Identifier of the prompt: a digest of its messages."
_INDEX = "Number of the response among those to its prompt, from 0."
_MESSAGES = "Chat messages of the prompt."
_ANSWER = "Reference answer, for oracles that compare."
_PROMPT_TOKENS = "The prompt under the policy's chat template."
_FINISH = "`stop` where the policy ended the response, `length` where the limit cut it off."

_SIDE = {
    "sample_index": _INDEX,
    "token_ids": "Sampled tokens.",
    "logprobs": "log π of each token under the sampling policy, at temperature 1.",
    "response": "Text.",
    "finish_reason": _FINISH,
    "score": "Score by the oracle.",
}

MEANINGS: Mapping[str, Mapping[str, str]] = {
    "prompts": {"prompt_id": _ID, "messages": _MESSAGES, "reference_answer": _ANSWER},
    "responses": {
        "prompt_id": _ID,
        "sample_index": _INDEX,
        "messages": _MESSAGES,
        "reference_answer": _ANSWER,
        "prompt_token_ids": _PROMPT_TOKENS,
        "response_token_ids": "Sampled tokens, the end-of-sequence token included where drawn.",
        "response_logprobs": "log π of each sampled token at temperature 1, before top-p.",
        "response": "Text of the response.",
        "finish_reason": _FINISH,
        "seed": "Seed of this response's sampling.",
    },
    "scores": {
        "prompt_id": _ID,
        "sample_index": _INDEX,
        "score": "The oracle's score; null where it could not score the response.",
        "error": "Reason why there is no score.",
        "components": "Parts of the score by name, where the oracle tells them.",
        "oracle": "Name of the oracle.",
    },
    "pairs": {
        "prompt_id": _ID,
        "messages": _MESSAGES,
        "prompt_token_ids": _PROMPT_TOKENS,
        **{
            f"{side}_{name}": f"{meaning} Of the {side} response."
            for side in ("chosen", "rejected")
            for name, meaning in _SIDE.items()
        },
        "tie": "Both responses score the same (`pair.ties: keep`).",
    },
    "distributions": {
        "model": "`policy` or `base`.",
        "prompt_id": _ID,
        "sample_index": _INDEX,
        "reward": "Score of the response; null where there is none.",
        "log_pi": "log-probability under the model that sampled it, summed over tokens.",
        "log_pi_ref": "The same under the base policy.",
        "num_tokens": "Tokens of the response.",
    },
}
"""Meanings by table and column, in the order of the schemas."""
