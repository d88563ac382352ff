"""Pairs laid out as rows of tokens: packed behind shared prompts, or padded.

Both layouts give the same log-probabilities; `padded` is plain enough to be the reference that
`packed` is compared with.

Shapes: `B` pairs, `R` rows, `T` tokens of a row, `S` tokens of a response, `N` response tokens of
all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from stages.modeling.shared_prefix import Group
from stages.train.data import Pair
from stages.train.params import RowLayoutName


@dataclass(frozen=True)
class DeviceTensors:
    """Base of dataclasses that hold tensors: `to` moves all of them, also of nested ones."""

    def to(self, device: torch.device) -> Self:
        """A copy on ``device``, dtypes unchanged; to a GPU it does not wait for the copies."""
        return replace(
            self, **{each.name: _moved(getattr(self, each.name), device) for each in fields(self)}
        )


@dataclass(frozen=True)
class Rows(DeviceTensors):
    """Pairs as a model's forward pass takes them.

    Attributes:
        input_ids: [R, T].
        source_index: Places in the flattened rows whose output predicts a response token, [N].
        targets: Those tokens, [N]: of the chosen responses, then of the rejected ones.
        response_mask: [2B, S], true on response tokens, in the order of `targets`.
        response_index: Places of the response tokens in the flattened `response_mask`, [N].
        groups: Lengths of the packed row's prompts and responses; None for padded rows.
    """

    input_ids: Tensor
    source_index: Tensor
    targets: Tensor
    response_mask: Tensor
    response_index: Tensor
    groups: tuple[Group, ...] | None

    def logprobs(self, model: Callable[..., Tensor]) -> Tensor:
        """Log π of the response tokens by `ResponseLogprobs`, wrapped or not: [N]."""
        return model(self.input_ids, self.source_index, self.targets, self.groups)

    def pad_responses(self, logprobs: Tensor) -> Tensor:
        """Lays out per-token values [N] as [2B, S], zero where there is no token."""
        mask = self.response_mask
        # By index, not by mask: the gradient of a masked copy would wait for the device.
        padded = torch.zeros(mask.numel(), dtype=logprobs.dtype, device=logprobs.device)
        return padded.index_copy(0, self.response_index, logprobs).view(mask.shape)


def packed_rows(pairs: Sequence[Pair]) -> Rows:
    """One row without padding: each pair's prompt, then its chosen, then its rejected response."""
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
    return _rows(pairs, _ids(tokens)[None], chosen_sources + rejected_sources, tuple(groups))


def padded_rows(pairs: Sequence[Pair]) -> Rows:
    """A row for each response behind its prompt, chosen ones first, padded on the right: R = 2B."""
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
    return _rows(pairs, torch.from_numpy(input_ids), sources, None)


ROWS: dict[RowLayoutName, Callable[[Sequence[Pair]], Rows]] = {
    "packed": packed_rows,
    "padded": padded_rows,
}


def _rows(
    pairs: Sequence[Pair],
    input_ids: Tensor,
    sources: Sequence[np.ndarray],
    groups: tuple[Group, ...] | None,
) -> Rows:
    responses = [pair.chosen.token_ids for pair in pairs]
    responses += [pair.rejected.token_ids for pair in pairs]
    mask = np.zeros((len(responses), max(map(len, responses))), dtype=bool)
    for row, response in enumerate(responses):
        mask[row, : len(response)] = True
    return Rows(
        input_ids=input_ids,
        source_index=_ids(sources),
        targets=_ids(responses),
        response_mask=torch.from_numpy(mask),
        response_index=torch.from_numpy(np.flatnonzero(mask)),
        groups=groups,
    )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, DeviceTensors):
        return value.to(device)
    if not isinstance(value, Tensor):
        return value
    if device.type == "cuda":
        # Only pinned memory is copied without the host waiting for it.
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def _ids(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
