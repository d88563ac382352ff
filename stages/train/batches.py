"""Which pairs make up which step, and their tensors.

The pairs of a step depend on seed and global batch size alone; world size and micro-batch only
decide where and in how many pieces they are computed.

Shapes: `B` pairs, `R = 2B` rows (the chosen ones first), `T` tokens of a row, `S` tokens of a
response, `N` response tokens of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from stages.contract.digests import derive_seed
from stages.train.data import Pair

RefLogprobs = dict[int, tuple[np.ndarray, np.ndarray]]
"""Per-token log π_ref by `Pair.index`: of the chosen and of the rejected response."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """How many pairs each step sees.

    Attributes:
        num_pairs: Pairs to train on.
        epochs: Passes over them.
        global_batch: Pairs per step; an epoch's last step may see fewer.
        micro_batch: Most pairs of one process in one forward pass.
        world_size: Processes.
        seed: Seed of the order.
    """

    num_pairs: int
    epochs: int
    global_batch: int
    micro_batch: int
    world_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return math.ceil(self.num_pairs / self.global_batch)

    @property
    def num_steps(self) -> int:
        """Optimizer steps in all."""
        return self.epochs * self.steps_per_epoch

    @property
    def accumulation(self) -> int:
        """Micro-batches of each process in a step."""
        largest = min(self.global_batch, self.num_pairs)
        return math.ceil(largest / (self.micro_batch * self.world_size))

    def pairs_of(self, step: int) -> list[int]:
        """Places of the pairs of a step (from 0), in the epoch's shuffled order."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        order = _permutation(self.num_pairs, derive_seed(self.seed, "order", epoch))
        return order[batch * self.global_batch : (batch + 1) * self.global_batch].tolist()

    def micro_batches(self, step: int, lengths: Sequence[int]) -> list[list[list[int]]]:
        """Deals the pairs of a step out, longest first so that rows of like length meet.

        Returns:
            For each micro-batch of the step, for each process, the places of its pairs. A process
            for which no pair is left gets an empty list.
        """
        pairs = sorted(self.pairs_of(step), key=lambda place: (-lengths[place], place))
        pieces = np.array_split(np.array(pairs), self.accumulation * self.world_size)
        parts = [piece.tolist() for piece in pieces]
        return [
            parts[start : start + self.world_size]
            for start in range(0, len(parts), self.world_size)
        ]


class MicroBatches(Dataset[Batch]):
    """All micro-batches of one process, in the order of training.

    Args:
        pairs: What is trained on.
        reference: Their log π_ref.
        plan: Which pairs are where.
        rank: This process, from 0.
    """

    def __init__(
        self, pairs: Sequence[Pair], reference: RefLogprobs, plan: Plan, rank: int
    ) -> None:
        self._pairs = pairs
        self._reference = reference
        self._plan = plan
        self._rank = rank
        self._lengths = [pair.num_tokens for pair in pairs]
        self._shortest = min(range(len(pairs)), key=self._lengths.__getitem__)
        self._dealt: tuple[int, list[list[list[int]]]] = (-1, [])

    def __len__(self) -> int:
        return self._plan.num_steps * self._plan.accumulation

    def __getitem__(self, index: int) -> Batch:
        step, micro = divmod(index, self._plan.accumulation)
        if self._dealt[0] != step:
            self._dealt = (step, self._plan.micro_batches(step, self._lengths))
        dealt = self._dealt[1]
        places = dealt[micro][self._rank]
        # A process without pairs still takes part in the step's collectives, with weight 0.
        weight = 1.0 / sum(len(part) for parts in dealt for part in parts) if places else 0.0
        pairs = [self._pairs[place] for place in places or [self._shortest]]
        batch = collate(pairs)
        batch["ref_logprobs"] = _padded_reference(pairs, self._reference)
        batch["tie"] = torch.tensor([pair.tie for pair in pairs])
        batch["weight"] = torch.tensor(weight, dtype=torch.float32)
        batch["num_tokens"] = torch.tensor(
            sum(
                2 * len(p.prompt) + len(p.chosen.token_ids) + len(p.rejected.token_ids)
                for p in pairs
            )
        )
        return batch


def collate(pairs: Sequence[Pair]) -> Batch:
    """Rows of a micro-batch, padded on the right to the longest.

    Returns:
        `input_ids` [R, T]; `source_index` [N], places in the flattened rows whose output predicts a
        response token; `targets` [N], those tokens; `response_mask` [R, S], true on response tokens
        in the order of `targets`.
    """
    rows = [(pair.prompt, pair.chosen.token_ids) for pair in pairs]
    rows += [(pair.prompt, pair.rejected.token_ids) for pair in pairs]
    width = max(len(prompt) + len(response) for prompt, response in rows)
    longest = max(len(response) for _, response in rows)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    response_mask = np.zeros((len(rows), longest), dtype=bool)
    sources = []
    for row, (prompt, response) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(response)
        input_ids[row, :start] = prompt
        input_ids[row, start:end] = response
        response_mask[row, : len(response)] = True
        sources.append(row * width + np.arange(start - 1, end - 1))
    return {
        "input_ids": torch.from_numpy(input_ids),
        "source_index": torch.from_numpy(np.concatenate(sources)),
        "targets": torch.from_numpy(
            np.concatenate([response for _, response in rows]).astype(np.int64)
        ),
        "response_mask": torch.from_numpy(response_mask),
    }


def pad_responses(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Lays out per-token values [N] as [R, S], zero where there is no token."""
    padded = torch.zeros(response_mask.shape, dtype=logprobs.dtype, device=logprobs.device)
    return padded.masked_scatter(response_mask, logprobs)


def _padded_reference(pairs: Sequence[Pair], reference: RefLogprobs) -> Tensor:
    rows = [reference[pair.index][side] for side in (0, 1) for pair in pairs]
    padded = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.float32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return torch.from_numpy(padded)


def _permutation(length: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).permutation(length)
