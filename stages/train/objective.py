"""Loss of preference pairs: objective, κ, metrics of a step, and validation pairs.

Shapes: `B` pairs of a micro-batch, `S` tokens of a response.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.objectives import (
    METRIC_SUMS,
    KappaController,
    KappaSchedule,
    ObjectiveSettings,
    ResponseLogps,
    geb_objective,
    loss_and_metrics,
    step_metrics,
    undefined_bonus,
)
from stages.train.data import Pair, PairBatch, RefLogprobs, pair_batches
from stages.train.params import ObjectiveParams, TrainParams
from stages.train.reference import FORWARD_FACTOR
from stages.training.batches import MicroBatches, Plan
from stages.training.engine import Engine
from stages.training.job import Process
from stages.training.loop import Objective
from stages.training.metrics_log import VALIDATION


def objective_settings(params: ObjectiveParams) -> ObjectiveSettings:
    """The objective, checked.

    Raises:
        UserError: The combination is not defined.
    """
    chosen = {name: getattr(params, name) for name in ObjectiveParams.model_fields}
    try:
        return ObjectiveSettings(**chosen)
    except ValueError as error:
        raise UserError(f"the objective: {error}", "choose another combination") from error


def kappa_controller(params: TrainParams) -> KappaController:
    """Controller of κ over the steps.

    Raises:
        UserError: The schedule is not defined.
    """
    try:
        schedule = KappaSchedule(
            kappa=params.kappa_or_default(),
            kind=params.kappa_schedule,
            final_fraction=params.kappa_final_fraction,
            values=params.kappa_values,
        )
        return KappaController(
            schedule,
            # f-DPO has no bonus that could be weighed.
            target_ratio=None if params.design == "none" else params.target_ratio,
            calibration_batches=params.calibration_batches,
        )
    except ValueError as error:
        raise UserError(f"kappa: {error}", "correct the value") from error


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
    """Lays validation pairs out as one step of all of them; None if there are none.

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


class PairObjective(Objective[PairBatch]):
    """The mean over a global batch's pairs of L − κ · L_bonus + weighted NLL.

    Args:
        engine: Computes log π.
        process: This process.
        settings: The objective.
        kappa: Gives κ of each step.
        num_steps: Steps of the training.
        iteration: Iteration of the run, from 1.
        validation: Pairs that are measured and not trained on, if there are any.
    """

    num_sums = len(METRIC_SUMS)
    remedy = "lower train.learning_rate or train.kappa, or choose another train.design"

    def __init__(
        self,
        engine: Engine,
        process: Process,
        *,
        settings: ObjectiveSettings,
        kappa: KappaController,
        num_steps: int,
        iteration: int,
        validation: Validation | None = None,
    ) -> None:
        self._engine = engine
        self._process = process
        self._settings = settings
        self._kappa = kappa
        self._num_steps = num_steps
        self._iteration = iteration
        self._validation = validation
        self._step_kappa = 0.0

    def before_step(self, step: int, batches: list[PairBatch]) -> None:
        """Settles the step's κ."""
        if self._kappa.calibrating:
            self._calibrate(batches)
        self._step_kappa = self._kappa.kappa(
            step=step, num_steps=self._num_steps, iteration=self._iteration
        )

    def micro_loss(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """The sum of the pairs' losses, and the sums of their metrics."""
        loss, sums = loss_and_metrics(
            *self._responses(batch), self._settings, self._step_kappa, batch.tie
        )
        return loss.sum(), sums

    def step_record(self, sums: Tensor) -> dict[str, float]:
        """The objective's metrics, κ, and the number of pairs."""
        num_pairs = sums[METRIC_SUMS.index("num_pairs")].item()
        return {**step_metrics(sums), "kappa": self._step_kappa, "num_pairs": num_pairs}

    def after_step(self, step: int) -> dict[str, float]:
        """Metrics of the validation pairs, and the seconds that they take; at most steps none."""
        validation = self._validation
        if validation is None or not validation.is_due(step + 1):
            return {}
        started = time.perf_counter()
        values = step_metrics(self._measure(validation.batches))
        self.check_finite(step, {"loss": values["preference_loss"]})
        return {
            **{VALIDATION + name: values[name] for name in MEASURED},
            f"{VALIDATION}seconds": time.perf_counter() - started,
        }

    def _measure(self, batches: MicroBatches[PairBatch, Pair]) -> Tensor:
        """Sums of the metrics of pairs that are not trained on, over all processes."""
        engine = self._engine
        sums = torch.zeros(self.num_sums, dtype=torch.float64, device=engine.device)
        engine.train(False)
        for number in range(len(batches)):
            batch = batches[number].to(engine.device)
            with torch.no_grad():
                # Even if no pair is left for this process: the forward pass is collective.
                responses = self._responses(batch)
            _, found = loss_and_metrics(*responses, self._settings, self._step_kappa, batch.tie)
            if batch.weight > 0.0:
                sums += found
        engine.train()
        return self._summed(sums).cpu()

    def _summed(self, sums: Tensor) -> Tensor:
        summed: Tensor = self._process.sum(sums)
        return summed

    def _calibrate(self, batches: list[PairBatch]) -> None:
        """Shows κ's controller |L| and |bonus| of the coming step, from a pass of its own."""
        device = self._engine.device
        absolute = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for each in batches:
                batch = each.to(device)
                # Even if no pair is left for this process: the forward pass is collective.
                chosen, rejected = self._responses(batch)
                output = geb_objective(chosen, rejected, self._settings, batch.tie)
                if batch.weight > 0.0:
                    terms = (output.preference_loss, output.bonus)
                    absolute += torch.stack([term.abs().double().sum() for term in terms])
        loss_sum, bonus_sum = self._summed(absolute).tolist()
        try:
            self._kappa.observe(abs_loss_sum=loss_sum, abs_bonus_sum=bonus_sum)
        except ValueError as error:
            raise UserError(
                f"train.target_ratio: {error}",
                "set train.kappa and unset train.target_ratio",
            ) from error

    def _responses(self, batch: PairBatch) -> tuple[ResponseLogps, ResponseLogps]:
        rows, reference = batch.rows, batch.ref_logprobs
        logp, mask = rows.pad_responses(self._engine.logprobs(rows)), rows.response_mask
        pairs = mask.shape[0] // 2
        chosen, rejected = (
            ResponseLogps(
                logp=logp[side].sum(dim=1),
                ref_logp=reference[side].sum(dim=1),
                num_tokens=mask[side].sum(dim=1),
                token_logp=logp[side],
                token_mask=mask[side],
                ref_token_logp=reference[side],
            )
            for side in (slice(0, pairs), slice(pairs, 2 * pairs))
        )
        return chosen, rejected

    def check_finite(self, step: int, values: dict[str, float]) -> None:
        """Explains bonuses that are undefined in the published form."""
        settings = self._settings
        reason = undefined_bonus(settings.bonus)
        # Validation pairs give the preference loss alone.
        terms = [values[name] for name in ("loss", "bonus") if name in values]
        if reason is not None and len(terms) == 2 and not any(map(math.isfinite, terms)):
            raise UserError(
                f"the bonus is {values['bonus']} at step {step + 1}: with "
                f"train.numerics 'paper' that of {settings.design} under {settings.divergence} is "
                f"undefined where {reason}",
                "set train.numerics to 'exact', which is defined everywhere",
            )
        super().check_finite(step, values)
