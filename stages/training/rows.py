"""Samples laid out as rows of tokens: packed behind shared prompts, or padded.

Both layouts give the same log-probabilities; `padded` is plain enough to be the reference that
`packed` is compared with.

Shapes: `B` samples of `k` responses each, `R` rows, `T` tokens of a row, `S` tokens of a response,
`N` response tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.modeling.shared_prefix import Group
from stages.training.params import RowLayoutName

T = TypeVar("T")
IntArray = NDArray[np.int32]


class Sample:
    """A prompt with its responses: what is never divided between micro-batches."""

    prompt: IntArray
    """Token ids."""

    @property
    def responses(self) -> tuple[IntArray, ...]:
        """Token ids of each response; all samples of a training have as many."""
        raise NotImplementedError

    @property
    def loss_terms(self) -> int:
        """Number of terms that it adds to the global batch's mean loss."""
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest of its rows."""
        return len(self.prompt) + max(map(len, self.responses))

    @property
    def num_tokens_shared(self) -> int:
        """Tokens of the prompt, once, and of all responses."""
        return len(self.prompt) + sum(map(len, self.responses))

    @property
    def num_tokens_unshared(self) -> int:
        """Tokens of all rows, the prompt in each."""
        return self.num_tokens_shared + (len(self.responses) - 1) * len(self.prompt)


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
    """Samples as a model's forward pass takes them.

    Attributes:
        input_ids: [R, T].
        source_index: Places in the flattened rows whose output predicts a response token, [N].
        targets: Those tokens, [N]: of all samples' first responses, then of their second ones, ….
        response_mask: [kB, S], true on response tokens, in the order of `targets`.
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
        """Lays out per-token values [N] as [kB, S], zero where there is no token."""
        mask = self.response_mask
        # By index, not by mask: the gradient of a masked copy would wait for the device.
        padded = torch.zeros(mask.numel(), dtype=logprobs.dtype, device=logprobs.device)
        return padded.index_copy(0, self.response_index, logprobs).view(mask.shape)


def packed_rows(samples: Sequence[Sample]) -> Rows:
    """One row without padding: each sample's prompt, then its responses."""
    tokens: list[IntArray] = []
    groups: list[Group] = []
    sources: list[list[np.ndarray]] = []
    start = 0
    for sample in samples:
        tokens += [sample.prompt, *sample.responses]
        groups.append((len(sample.prompt), *map(len, sample.responses)))
        # The prompt's last token predicts the first token of every response.
        last = end = start + len(sample.prompt) - 1
        own = []
        for response in sample.responses:
            own.append(np.concatenate([[last], end + np.arange(1, len(response))]))
            end += len(response)
        sources.append(own)
        start += sum(groups[-1])
    return _rows(samples, _ids(tokens)[None], _by_side(sources), tuple(groups))


def padded_rows(samples: Sequence[Sample]) -> Rows:
    """A row for each response behind its prompt, padded on the right; first responses first."""
    sides = _by_side([[(sample.prompt, each) for each in sample.responses] for sample in samples])
    width = max(len(prompt) + len(response) for prompt, response in sides)
    input_ids = np.zeros((len(sides), width), dtype=np.int64)
    sources = []
    for row, (prompt, response) in enumerate(sides):
        start, end = len(prompt), len(prompt) + len(response)
        input_ids[row, :start] = prompt
        input_ids[row, start:end] = response
        sources.append(row * width + np.arange(start - 1, end - 1))
    return _rows(samples, torch.from_numpy(input_ids), sources, None)


ROWS: dict[RowLayoutName, Callable[[Sequence[Sample]], Rows]] = {
    "packed": packed_rows,
    "padded": padded_rows,
}


def _rows(
    samples: Sequence[Sample],
    input_ids: Tensor,
    sources: Sequence[np.ndarray],
    groups: tuple[Group, ...] | None,
) -> Rows:
    responses = _by_side([sample.responses for sample in samples])
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


def _by_side(samples: Sequence[Sequence[T]]) -> list[T]:
    """Values of the first responses of all samples, then of their second ones, …."""
    return [each for side in zip(*samples, strict=True) for each in side]


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
