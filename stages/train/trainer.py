"""The trainer's loss of preference pairs, with κ and the objective's metrics.

Shapes: `B` pairs of a micro-batch, `S` tokens of a response.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn

from stages.contract.errors import UserError
from stages.objectives import (
    METRIC_SUMS,
    KappaController,
    ObjectiveSettings,
    ResponseLogps,
    geb_objective,
    loss_and_metrics,
    step_metrics,
    undefined_bonus,
)
from stages.train.batches import PairBatch
from stages.train.data import Pair
from stages.train.validation import MEASURED, Validation
from stages.training.batches import MicroBatches
from stages.training.metrics_log import VALIDATION
from stages.training.trainer import PackedTrainer, Setup


class PairTrainer(PackedTrainer[PairBatch]):
    """Minimises the mean over a global batch's pairs of L − κ · L_bonus + weighted NLL.

    Args:
        setup: Model, plan and arguments.
        batches: All micro-batches of this process.
        settings: The objective.
        kappa: Gives κ of each step.
        iteration: Iteration of the run, from 1.
        validation: Pairs that are measured and not trained on, if there are any.
    """

    def __init__(
        self,
        setup: Setup,
        batches: MicroBatches[PairBatch, Pair],
        *,
        settings: ObjectiveSettings,
        kappa: KappaController,
        iteration: int,
        validation: Validation | None = None,
    ) -> None:
        super().__init__(setup, batches, num_sums=len(METRIC_SUMS))
        self._settings = settings
        self._kappa = kappa
        self._iteration = iteration
        self._validation = validation
        self._step_kappa = 0.0

    @property
    def remedy(self) -> str:
        """Remedy where the loss is not finite."""
        return "lower train.learning_rate or train.kappa, or choose another train.design"

    def before_step(self, samples: list[PairBatch]) -> None:
        """Settles the step's κ."""
        if self._kappa.calibrating:
            self._calibrate(samples)
        self._step_kappa = self._kappa.kappa(
            step=self.state.global_step, num_steps=self._plan.num_steps, iteration=self._iteration
        )

    def micro_loss(self, model: nn.Module, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """The sum of the pairs' losses, and the sums of their metrics."""
        loss, sums = loss_and_metrics(
            *self._responses(model, batch), self._settings, self._step_kappa, batch.tie
        )
        return loss.sum(), sums

    def step_record(self, sums: Tensor) -> dict[str, float]:
        """The objective's metrics, κ, and the number of pairs."""
        num_pairs = sums[METRIC_SUMS.index("num_pairs")].item()
        return {**step_metrics(sums), "kappa": self._step_kappa, "num_pairs": num_pairs}

    def after_step(self) -> dict[str, float]:
        """Metrics of the validation pairs, and the seconds that they take; at most steps none."""
        validation = self._validation
        if validation is None or not validation.is_due(self.state.global_step):
            return {}
        started = time.perf_counter()
        values = step_metrics(self._measure(validation.batches))
        self.check_finite({"loss": values["preference_loss"]})
        return {
            **{VALIDATION + name: values[name] for name in MEASURED},
            f"{VALIDATION}seconds": time.perf_counter() - started,
        }

    def _measure(self, batches: MicroBatches[PairBatch, Pair]) -> Tensor:
        """Sums of the metrics of pairs that are not trained on, over all processes."""
        sums, model = self._no_sums(), self.model_wrapped
        model.eval()
        for number in range(len(batches)):
            inputs = self._prepare_inputs(batches[number])
            with torch.no_grad():
                # Also where no pair is left for this process: the forward pass is collective.
                responses = self._responses(model, inputs)
            _, found = loss_and_metrics(*responses, self._settings, self._step_kappa, inputs.tie)
            if inputs.weight > 0.0:
                sums += found
        model.train()
        return self.reduce(sums).cpu()

    def _calibrate(self, samples: list[PairBatch]) -> None:
        """Shows κ's controller |L| and |bonus| of the coming step, from a pass of its own."""
        absolute = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        with torch.no_grad():
            for sample in samples:
                inputs = self._prepare_inputs(sample)
                # Also where no pair is left for this process: the forward pass is collective.
                chosen, rejected = self._responses(self.model_wrapped, inputs)
                output = geb_objective(chosen, rejected, self._settings, inputs.tie)
                if inputs.weight > 0.0:
                    terms = (output.preference_loss, output.bonus)
                    absolute += torch.stack([term.abs().double().sum() for term in terms])
        loss_sum, bonus_sum = self.reduce(absolute).tolist()
        try:
            self._kappa.observe(abs_loss_sum=loss_sum, abs_bonus_sum=bonus_sum)
        except ValueError as error:
            raise UserError(
                f"train.target_ratio: {error}",
                "set train.kappa and unset train.target_ratio",
            ) from error

    def _responses(
        self, model: nn.Module, inputs: PairBatch
    ) -> tuple[ResponseLogps, ResponseLogps]:
        rows, reference = inputs.rows, inputs.ref_logprobs
        logp, mask = rows.pad_responses(rows.logprobs(model)), rows.response_mask
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

    def check_finite(self, logs: dict[str, float]) -> None:
        """Explains bonuses that are undefined in the published form."""
        settings = self._settings
        reason = undefined_bonus(settings.bonus)
        # Of validation pairs only the preference loss is given.
        terms = [logs[name] for name in ("loss", "bonus") if name in logs]
        if reason is not None and len(terms) == 2 and not any(map(math.isfinite, terms)):
            raise UserError(
                f"the bonus is {logs['bonus']} at step {self.state.global_step}: with "
                f"train.numerics 'paper' that of {settings.design} under {settings.divergence} is "
                f"undefined where {reason}",
                "set train.numerics to 'exact', which is defined everywhere",
            )
        super().check_finite(logs)
