"""Steps of a training: samples laid out as rows of tokens, and the micro-batches of each step.

Packed rows lie behind shared prompts, padded ones are plain enough to be compared with; both give
the same log-probabilities. The samples of a step depend on seed and global batch size alone; world
size, row layout and token budget only decide where and in how many pieces they are computed.

Shapes: `B` samples of `k` responses each, `R` rows, `T` tokens of a row, `S` tokens of a response,
`N` response tokens of all samples.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.contract.digests import derive_seed
from stages.modeling.shared_prefix import Group, on_device
from stages.training.params import RowLayoutName, TrainingParams

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
    def row_tokens(self) -> int:
        """Tokens of the prompt and of the longest response."""
        return len(self.prompt) + max(map(len, self.responses))

    @property
    def num_response_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(map(len, self.responses))

    @property
    def num_tokens_shared(self) -> int:
        """Tokens of the prompt, once, and of all responses."""
        return len(self.prompt) + self.num_response_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, once for each response, and of all responses."""
        return len(self.responses) * len(self.prompt) + self.num_response_tokens


@dataclass(frozen=True)
class Example(Sample):
    """A prompt with one response, each of whose tokens is a term of the loss; 4 bytes a token."""

    prompt: IntArray
    response: IntArray

    @property
    def responses(self) -> tuple[IntArray, ...]:
        """The response."""
        return (self.response,)

    @property
    def loss_terms(self) -> int:
        """Tokens of the response: the loss is a mean over tokens."""
        return len(self.response)


@dataclass(frozen=True)
class Rows:
    """Samples as a model's forward pass takes them."""

    input_ids: Tensor
    """[R, T]."""
    source_index: Tensor
    """Places in the flattened rows whose output predicts a response token, [N]."""
    targets: Tensor
    """Those tokens, [N]: of all samples' first responses, then of their second ones, …."""
    response_mask: Tensor
    """[kB, S], true on response tokens, in the order of `targets`."""
    response_index: Tensor
    """Places of the response tokens in the flattened `response_mask`, [N]."""
    groups: tuple[Group, ...] | None
    """Lengths of the packed row's prompts and responses; None for padded rows."""

    def to(self, device: torch.device) -> Self:
        """A copy on ``device``; to a GPU it does not wait for the copies."""
        tensors: dict[str, Any] = {
            name: on_device(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **tensors)

    def logprobs(self, model: Callable[..., Tensor]) -> Tensor:
        """Log π of the response tokens by `ResponseLogprobs`, wrapped or not: [N]."""
        return model(self.input_ids, self.source_index, self.targets, self.groups)

    def pad_responses(self, logprobs: Tensor) -> Tensor:
        """Lays out per-token values [N] as [kB, S], with zeros elsewhere."""
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
        places = []
        for response in sample.responses:
            places.append(np.concatenate([[last], end + np.arange(1, len(response))]))
            end += len(response)
        sources.append(places)
        start += sum(groups[-1])
    return _rows(samples, _ids(tokens)[None], _by_side(sources), tuple(groups))


def padded_rows(samples: Sequence[Sample]) -> Rows:
    """A row for each response behind its prompt, padded on the right; first responses first."""
    sides = _by_side(
        [[(sample.prompt, response) for response in sample.responses] for sample in samples]
    )
    width = max(len(prompt) + len(response) for prompt, response in sides)
    input_ids = np.zeros((len(sides), width), dtype=np.int64)
    sources = []
    for row, (prompt, response) in enumerate(sides):
        start = len(prompt)
        end = len(prompt) + len(response)
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
    return [value for side in zip(*samples, strict=True) for value in side]


def _ids(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


S = TypeVar("S", bound=Sample)


@dataclass(frozen=True)
class Batch(Generic[S]):
    """A micro-batch of one process."""

    samples: Sequence[S]
    weight: float
    """Weight of each term in the global batch's mean; 0 if no sample was left for the process,
    which computes one all the same because the forward pass is collective."""


@dataclass(frozen=True)
class Plan(Generic[S]):
    """Samples of each step, and the number of its micro-batches."""

    samples: Sequence[S]
    """All that is trained on."""
    params: TrainingParams
    """Passes over them, layout of rows, and most tokens of a micro-batch of a process, padding
    counted; a longer sample makes a micro-batch alone."""
    global_batch: int
    """Samples per step; an epoch's last step may see fewer."""
    world_size: int
    seed: int
    """Seed of the order."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch; the last may see fewer samples."""
        return math.ceil(len(self.samples) / self.global_batch)

    @property
    def num_steps(self) -> int:
        """Optimizer steps in all."""
        return self.params.epochs * self.steps_per_epoch

    @cached_property
    def shortest(self) -> S:
        """The sample of the fewest tokens."""
        return min(self.samples, key=lambda sample: sample.num_tokens_shared)

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches of each process in a step: as few as keep within the budget in all steps.

        The same for all steps, as DeepSpeed wants it.
        """
        steps = [self.samples_of(step) for step in range(self.num_steps)]
        count = 1
        if self.params.row_layout == "packed":
            at_once = self.params.token_budget * self.world_size
            count = math.ceil(max(map(self.tokens, steps)) / at_once)
        while not all(self._fits(self._deal(samples, count)) for samples in steps):
            count += 1
        return count

    def samples_of(self, step: int) -> list[S]:
        """The samples of a step (from 0), which its epoch's shuffled order chooses."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        order = _permutation(len(self.samples), derive_seed(self.seed, "order", epoch))
        start = batch * self.global_batch
        return [self.samples[place] for place in sorted(order[start : start + self.global_batch])]

    def micro_batches(self, step: int) -> list[list[list[S]]]:
        """Deals the samples of a step out, so that processes have about as much to do.

        Returns:
            For each micro-batch of the step, for each process, its samples. A process for which no
            sample is left gets an empty list.
        """
        parts = self._deal(self.samples_of(step), self.accumulation)
        return [
            parts[start : start + self.world_size]
            for start in range(0, len(parts), self.world_size)
        ]

    def batches(self, step: int, rank: int) -> list[Batch[S]]:
        """The micro-batches of one process in a step (from 0)."""
        terms = sum(sample.loss_terms for sample in self.samples_of(step))
        # Rounded as the loss that it weighs.
        weight = float(np.float32(1.0 / terms))
        parts = [parts[rank] for parts in self.micro_batches(step)]
        return [Batch(part, weight) if part else Batch([self.shortest], 0.0) for part in parts]

    def tokens(self, samples: Sequence[S]) -> int:
        """Tokens of a micro-batch, padding counted."""
        if self.params.row_layout == "packed":
            return sum(sample.num_tokens_shared for sample in samples)
        return sum(len(sample.responses) for sample in samples) * max(
            sample.row_tokens for sample in samples
        )

    def _fits(self, parts: Sequence[Sequence[S]]) -> bool:
        budget = self.params.token_budget
        return all(len(part) <= 1 or self.tokens(part) <= budget for part in parts)

    def _deal(self, samples: Sequence[S], accumulation: int) -> list[list[S]]:
        """Splits samples into micro-batches, the largest first: what needs too much fails early."""
        count = accumulation * self.world_size
        if self.params.row_layout == "padded":
            by_length = np.array(sorted(samples, key=lambda sample: -sample.row_tokens), object)
            return [part.tolist() for part in np.array_split(by_length, count)]
        parts: list[list[S]] = [[] for _ in range(count)]
        # The longest sample that is left goes where the fewest tokens are.
        loads = [(0, part) for part in range(count)]
        for sample in sorted(samples, key=lambda sample: -sample.num_tokens_shared):
            load, part = heapq.heappop(loads)
            parts[part].append(sample)
            heapq.heappush(loads, (load + sample.num_tokens_shared, part))
        return [parts[part] for _, part in sorted(loads, key=lambda load: (-load[0], load[1]))]


# The order of an epoch, for all of its steps: drawn for each of them it takes minutes of a million
# samples.
@lru_cache(maxsize=2)
def _permutation(length: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).permutation(length)
