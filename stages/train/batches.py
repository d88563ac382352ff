"""Micro-batches of preference pairs, with their log π_ref.

Shapes: `B` pairs, `S` tokens of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.train.data import Pair
from stages.training.batches import Batch, MicroBatches, Plan

RefLogprobs = dict[int, tuple[np.ndarray, np.ndarray]]
"""Per-token log π_ref by `Pair.index`: of the chosen and of the rejected response."""


@dataclass(frozen=True)
class PairBatch(Batch):
    """A micro-batch of pairs.

    Attributes:
        ref_logprobs: log π_ref per response token, zero where there is none, [2B, S].
        tie: Booleans [B]; neither response is preferred.
    """

    ref_logprobs: Tensor
    tie: Tensor


def pair_batches(
    reference: RefLogprobs, plan: Plan[Pair], rank: int
) -> MicroBatches[PairBatch, Pair]:
    """All micro-batches of one process, in the order of training.

    Args:
        reference: Log π_ref of the plan's pairs.
        plan: Place of every pair.
        rank: The process, from 0.
    """

    def make(pairs: Sequence[Pair], **fields: Any) -> PairBatch:
        return PairBatch(
            ref_logprobs=_padded_reference(pairs, reference),
            tie=torch.tensor([pair.tie for pair in pairs]),
            **fields,
        )

    return MicroBatches(plan, rank, make)


def _padded_reference(pairs: Sequence[Pair], reference: RefLogprobs) -> Tensor:
    rows = [reference[pair.index][side] for side in (0, 1) for pair in pairs]
    padded = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.float32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return torch.from_numpy(padded)
