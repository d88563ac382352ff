"""Pairs laid out as rows of tokens: packed behind shared prompts, or padded.

Both layouts give the same log-probabilities; `padded` is plain enough to be the reference that
`packed` is compared with.

Shapes: `B` pairs, `R` rows, `T` tokens of a row, `S` tokens of a response, `N` response tokens of
all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.modeling.shared_prefix import Group
from stages.train.data import Pair
from stages.train.params import RowLayoutName

Batch = dict[str, Any]
"""Tensors of a micro-batch by name, and `groups`: the packed row's layout, or None."""

MODEL_INPUTS = ("input_ids", "source_index", "targets", "groups")
"""What of a batch the model's forward pass takes."""


def packed_rows(pairs: Sequence[Pair]) -> Batch:
    """One row without padding: each pair's prompt, then its chosen, then its rejected response.

    Returns:
        `input_ids` [1, T]; `source_index` [N], places in the row whose output predicts a response
        token; `targets` [N], those tokens, chosen responses first; `response_mask` [2B, S], true
        on response tokens in the order of `targets`; `groups`, the lengths of the parts.
    """
    tokens: list[np.ndarray] = []
    groups: list[Group] = []
    chosen_sources: list[np.ndarray] = []
    rejected_sources: list[np.ndarray] = []
    start = 0
    for pair in pairs:
        prompt, chosen, rejected = (pair.prompt, pair.chosen.token_ids, pair.rejected.token_ids)
        tokens += [prompt, chosen, rejected]
        groups.append((len(prompt), len(chosen), len(rejected)))
        # The prompt's last token predicts the first token of both responses.
        last = start + len(prompt) - 1
        chosen_sources.append(np.arange(last, last + len(chosen)))
        own = last + len(chosen) + np.arange(1, len(rejected))
        rejected_sources.append(np.concatenate([[last], own]))
        start += sum(groups[-1])
    return {
        "input_ids": _ids(tokens)[None],
        "source_index": _ids(chosen_sources + rejected_sources),
        **_targets(pairs),
        "groups": tuple(groups),
    }


def padded_rows(pairs: Sequence[Pair]) -> Batch:
    """A row for each response behind its prompt, padded on the right to the longest.

    Returns:
        As :func:`packed_rows`, with `input_ids` [2B, T], chosen rows first, and no `groups`.
    """
    rows = [(pair.prompt, pair.chosen.token_ids) for pair in pairs]
    rows += [(pair.prompt, pair.rejected.token_ids) for pair in pairs]
    width = max(len(prompt) + len(response) for prompt, response in rows)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    sources = []
    for row, (prompt, response) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(response)
        input_ids[row, :start] = prompt
        input_ids[row, start:end] = response
        sources.append(row * width + np.arange(start - 1, end - 1))
    return {
        "input_ids": torch.from_numpy(input_ids),
        "source_index": _ids(sources),
        **_targets(pairs),
        "groups": None,
    }


ROWS: dict[RowLayoutName, Callable[[Sequence[Pair]], Batch]] = {
    "packed": packed_rows,
    "padded": padded_rows,
}


def pad_responses(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Lays out per-token values [N] as [2B, S], zero where there is no token."""
    padded = torch.zeros(response_mask.shape, dtype=logprobs.dtype, device=logprobs.device)
    return padded.masked_scatter(response_mask, logprobs)


def _targets(pairs: Sequence[Pair]) -> dict[str, Tensor]:
    responses = [pair.chosen.token_ids for pair in pairs]
    responses += [pair.rejected.token_ids for pair in pairs]
    mask = np.zeros((len(responses), max(map(len, responses))), dtype=bool)
    for row, response in enumerate(responses):
        mask[row, : len(response)] = True
    return {"targets": _ids(responses), "response_mask": torch.from_numpy(mask)}


def _ids(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
