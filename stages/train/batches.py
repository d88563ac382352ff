"""Which pairs make up which step, and in which micro-batches they are computed.

The pairs of a step depend on seed and global batch size alone; world size, row layout and token
budget only decide where and in how many pieces they are computed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from stages.contract.digests import derive_seed
from stages.train.data import Pair
from stages.train.params import RowLayoutName
from stages.train.rows import ROWS, DeviceTensors, Rows

RefLogprobs = dict[int, tuple[np.ndarray, np.ndarray]]
"""Per-token log π_ref by `Pair.index`: of the chosen and of the rejected response."""


@dataclass(frozen=True)
class Plan:
    """What each step sees, and in how many micro-batches.

    Attributes:
        pairs: What is trained on; a pair's place in it is its name here.
        epochs: Passes over them.
        global_batch: Pairs per step; an epoch's last step may see fewer.
        world_size: Processes.
        seed: Seed of the order.
        row_layout: How the pairs of a micro-batch are laid out.
        micro_batch_tokens: Most tokens in one micro-batch of a process, padding counted; a pair
            that is longer makes a micro-batch of its own.
    """

    pairs: Sequence[Pair]
    epochs: int
    global_batch: int
    world_size: int
    seed: int
    row_layout: RowLayoutName
    micro_batch_tokens: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return math.ceil(len(self.pairs) / self.global_batch)

    @property
    def num_steps(self) -> int:
        """Optimizer steps in all."""
        return self.epochs * self.steps_per_epoch

    @cached_property
    def accumulation(self) -> int:
        """Micro-batches of each process in a step: as few as keep within the budget in all steps.

        The same for all steps, as the Trainer and DeepSpeed want it.
        """
        steps = [self.pairs_of(step) for step in range(self.num_steps)]
        at_once = self.micro_batch_tokens * self.world_size
        count = max(math.ceil(self._tokens(places) / at_once) for places in steps)
        if self.row_layout == "padded":
            count = 1
        while not all(self._fits(self._deal(places, count)) for places in steps):
            count += 1
        return count

    def pairs_of(self, step: int) -> list[int]:
        """Places of the pairs of a step (from 0), in the epoch's shuffled order."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        order = _permutation(len(self.pairs), derive_seed(self.seed, "order", epoch))
        return order[batch * self.global_batch : (batch + 1) * self.global_batch].tolist()

    def micro_batches(self, step: int) -> list[list[list[int]]]:
        """Deals the pairs of a step out, so that processes have about as much to do.

        Returns:
            For each micro-batch of the step, for each process, the places of its pairs. A process
            for which no pair is left gets an empty list.
        """
        parts = self._deal(self.pairs_of(step), self.accumulation)
        return [
            parts[start : start + self.world_size]
            for start in range(0, len(parts), self.world_size)
        ]

    def tokens(self, places: Sequence[int]) -> int:
        """Tokens of a micro-batch of the pairs at ``places``, padding counted."""
        if self.row_layout == "packed":
            return self._tokens(places)
        return 2 * len(places) * max((self.pairs[place].num_tokens for place in places), default=0)

    def _tokens(self, places: Sequence[int]) -> int:
        return sum(self.pairs[place].num_tokens_shared for place in places)

    def _fits(self, parts: Sequence[Sequence[int]]) -> bool:
        budget = self.micro_batch_tokens
        return all(len(part) <= 1 or self.tokens(part) <= budget for part in parts)

    def _deal(self, places: Sequence[int], accumulation: int) -> list[list[int]]:
        """Splits pairs into micro-batches, the largest first: what needs too much fails early."""
        count = accumulation * self.world_size
        if self.row_layout == "padded":
            by_length = sorted(places, key=lambda place: (-self.pairs[place].num_tokens, place))
            return [part.tolist() for part in np.array_split(np.array(by_length), count)]
        by_size = sorted(places, key=lambda place: (-self.pairs[place].num_tokens_shared, place))
        parts: list[list[int]] = [[] for _ in range(count)]
        # The longest pair that is left goes where the fewest tokens are.
        loads = [(0, part) for part in range(count)]
        for place in by_size:
            load, part = heapq.heappop(loads)
            parts[part].append(place)
            heapq.heappush(loads, (load + self.pairs[place].num_tokens_shared, part))
        return [parts[part] for _, part in sorted(loads, key=lambda each: (-each[0], each[1]))]


@dataclass(frozen=True)
class Batch(DeviceTensors):
    """A micro-batch of one process.

    Numbers that only the host needs are numbers, not tensors: to read them waits for no device.

    Attributes:
        rows: Its pairs.
        ref_logprobs: log π_ref per response token, zero where there is none, [2B, S].
        tie: Booleans [B]; neither response is preferred.
        weight: Weight of each pair in the global batch's mean; 0 where no pair was left for the
            process, which computes one all the same because the forward pass is collective.
        num_tokens: Tokens of the pairs with each prompt counted twice.
        num_tokens_shared: The same with each prompt counted once.
        num_response_tokens: Tokens of the responses.
    """

    rows: Rows
    ref_logprobs: Tensor
    tie: Tensor
    weight: float
    num_tokens: int
    num_tokens_shared: int
    num_response_tokens: int


class MicroBatches(Dataset[Batch]):
    """All micro-batches of one process, in the order of training.

    Args:
        reference: Log π_ref of the plan's pairs.
        plan: Which pairs are where.
        rank: This process, from 0.
    """

    def __init__(self, reference: RefLogprobs, plan: Plan, rank: int) -> None:
        self._reference = reference
        self._plan = plan
        self._rank = rank
        sizes = [pair.num_tokens_shared for pair in plan.pairs]
        self._shortest = min(range(len(sizes)), key=sizes.__getitem__)
        self._dealt: tuple[int, list[list[list[int]]]] = (-1, [])

    def __len__(self) -> int:
        return self._plan.num_steps * self._plan.accumulation

    def __getitem__(self, index: int) -> Batch:
        plan = self._plan
        step, micro = divmod(index, plan.accumulation)
        if self._dealt[0] != step:
            self._dealt = (step, plan.micro_batches(step))
        dealt = self._dealt[1]
        places = dealt[micro][self._rank]
        # A process without pairs still takes part in the step's collectives, with weight 0.
        weight = 1.0 / sum(len(part) for parts in dealt for part in parts) if places else 0.0
        pairs = [plan.pairs[place] for place in places or [self._shortest]]
        rows = ROWS[plan.row_layout](pairs)
        return Batch(
            rows=rows,
            ref_logprobs=_padded_reference(pairs, self._reference),
            tie=torch.tensor([pair.tie for pair in pairs]),
            # Rounded as the loss is that it weighs.
            weight=float(np.float32(weight)),
            num_tokens=sum(pair.num_tokens_unshared for pair in pairs),
            num_tokens_shared=sum(pair.num_tokens_shared for pair in pairs),
            num_response_tokens=len(rows.targets),
        )


def _padded_reference(pairs: Sequence[Pair], reference: RefLogprobs) -> Tensor:
    rows = [reference[pair.index][side] for side in (0, 1) for pair in pairs]
    padded = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.float32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return torch.from_numpy(padded)


def _permutation(length: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).permutation(length)
