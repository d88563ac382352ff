"""Validation pairs: kept from the updates, by prompt, and measured during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.train.batches import PairBatch, RefLogprobs, pair_batches
from stages.train.data import Pair
from stages.train.reference import FORWARD_FACTOR
from stages.training.batches import MicroBatches, Plan

MEASURED = ("preference_loss", "accuracy", "margin")
"""Metrics of the objective that are computed of validation pairs."""
_SEEDS = 2**63


@dataclass(frozen=True)
class Validation:
    """Validation pairs as micro-batches, and the steps at which they are measured.

    Attributes:
        batches: All micro-batches of this process.
        every_steps: Steps between two measurements.
        num_steps: Steps of the training; they are measured after the last one, too.
    """

    batches: MicroBatches[PairBatch, Pair]
    every_steps: int
    num_steps: int

    def is_due(self, step: int) -> bool:
        """True for a step (from 1) after which they are measured."""
        return step % self.every_steps == 0 or step == self.num_steps


def split_by_prompt(pairs: Sequence[Pair], share: float) -> tuple[list[Pair], list[Pair]]:
    """Splits pairs into those to train on and those for validation.

    A prompt's side depends on its id and the share alone, so that accumulated pairs of an earlier
    iteration stay where they were. At least one prompt is for validation.

    Args:
        pairs: All pairs.
        share: Share of prompts for validation; with 0 there are none.

    Raises:
        UserError: No prompt would be left to train on.
    """
    if share == 0.0:
        return list(pairs), []
    places = {prompt: _place(prompt) for prompt in {pair.prompt_id for pair in pairs}}
    chosen = {prompt for prompt, place in places.items() if place < share}
    chosen |= {min(places, key=lambda prompt: places[prompt])}
    if len(chosen) == len(places):
        raise UserError(
            f"train.validation_share = {share:g} takes all of {len(places)} prompts: no pair is "
            "left to train on",
            "lower it, set it to 0, or bring more prompts",
        )
    trained = [pair for pair in pairs if pair.prompt_id not in chosen]
    return trained, [pair for pair in pairs if pair.prompt_id in chosen]


def make_validation(
    pairs: Sequence[Pair],
    reference: RefLogprobs,
    plan: Plan[Pair],
    *,
    rank: int,
    every_steps: int | None,
) -> Validation | None:
    """Lays validation pairs out as one step of all of them; None where there are none.

    Args:
        pairs: The validation pairs.
        reference: Their log π_ref.
        plan: That of the training.
        rank: This process, from 0.
        every_steps: Steps between two measurements; None for an epoch's.
    """
    if not pairs:
        return None
    tokens = plan.micro_batch_tokens * FORWARD_FACTOR
    whole = replace(
        plan, samples=pairs, epochs=1, global_batch=len(pairs), micro_batch_tokens=tokens
    )
    return Validation(
        pair_batches(reference, whole, rank), every_steps or plan.steps_per_epoch, plan.num_steps
    )


def _place(prompt: str) -> float:
    """A number in [0, 1), uniform over prompts."""
    return derive_seed(0, "validation", prompt) / _SEEDS
