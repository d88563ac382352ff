"""Loss of preference pairs: objective, κ, and metrics of a step.

Shapes: `B` pairs of a micro-batch, `S` tokens of a response.
"""

import math

import torch
from torch import Tensor

from stages.contract.errors import UserError
from stages.objectives.bonuses import defined_bonus, undefined_bonus
from stages.objectives.kappa import KappaController
from stages.objectives.metrics import METRIC_SUMS, loss_and_metrics, step_metrics
from stages.objectives.objective import OwnTerms, ResponseLogps, geb_objective
from stages.objectives.params import ObjectiveParams
from stages.train.data import PairBatch
from stages.train.params import TrainParams
from stages.training.engine import Engine, Process
from stages.training.loop import Objective


def check_objective(params: ObjectiveParams) -> None:
    """Refuses a bonus that is not defined.

    Raises:
        UserError: The design is not defined under the divergence or in these numerics.
    """
    try:
        defined_bonus(params.design, params.divergence, params.numerics)
    except ValueError as error:
        raise UserError(f"the objective: {error}", "choose another combination") from error


class PairObjective(Objective[PairBatch]):
    """The mean over a global batch's pairs of L − κ · L_bonus + weighted NLL."""

    num_sums = len(METRIC_SUMS)
    remedy = "lower train.learning_rate or train.kappa, or choose another train.design"

    def __init__(
        self,
        engine: Engine,
        process: Process,
        *,
        params: TrainParams,
        kappa: KappaController,
        num_steps: int,
        own: OwnTerms | None = None,
    ) -> None:
        self._engine = engine
        self._process = process
        self._params = params
        self._kappa = kappa
        self._num_steps = num_steps
        self._own = own
        self._step_kappa = 0.0

    def before_step(self, step: int, batches: list[PairBatch]) -> None:
        """Settles the step's κ."""
        if self._kappa.calibrating:
            self._calibrate(batches)
        self._step_kappa = self._kappa.kappa(
            step=step, num_steps=self._num_steps, iteration=self._params.iteration
        )

    def micro_loss(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """The sum of the pairs' losses, and the sums of their metrics."""
        loss, sums = loss_and_metrics(
            *self._responses(batch), self._params, self._step_kappa, batch.tie, self._own
        )
        return loss.sum(), sums

    def step_record(self, sums: Tensor) -> dict[str, float]:
        """The objective's metrics, κ, and the number of pairs."""
        num_pairs = sums[METRIC_SUMS.index("num_pairs")].item()
        return {**step_metrics(sums), "kappa": self._step_kappa, "num_pairs": num_pairs}

    def _calibrate(self, batches: list[PairBatch]) -> None:
        """Shows κ's controller |L| and |bonus| of the coming step, from a pass of its own."""
        device = self._engine.device
        absolute = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for each in batches:
                batch = each.to(device)
                # Even if no pair is left for this process: the forward pass is collective.
                chosen, rejected = self._responses(batch)
                output = geb_objective(chosen, rejected, self._params, batch.tie, self._own)
                if batch.weight > 0.0:
                    terms = (output.preference_loss, output.bonus)
                    absolute += torch.stack([term.abs().double().sum() for term in terms])
        loss_sum, bonus_sum = self._process.sum(absolute).tolist()
        try:
            self._kappa.observe(abs_loss_sum=loss_sum, abs_bonus_sum=bonus_sum)
        except ValueError as error:
            raise UserError(
                f"train.target_ratio: {error}",
                "set train.kappa and unset train.target_ratio",
            ) from error
        if self._kappa.vanished:
            self._process.events.warning(
                "the bonus of all pairs is exactly 0 in the batches that set κ: at such "
                "log-probabilities the published form underflows, and training goes on without a "
                "bonus, as the published code does; train.numerics=exact with "
                "train.probability=token has one"
            )

    def _responses(self, batch: PairBatch) -> tuple[ResponseLogps, ResponseLogps]:
        rows, reference = batch.rows, batch.ref_logprobs
        logp, mask = rows.pad_responses(self._engine.logprobs(rows)), rows.response_mask
        pairs, params = mask.shape[0] // 2, self._params
        weighs = params.bonus_weight != "none" or params.bonus_on == "mixture"
        chosen, rejected = (
            ResponseLogps(
                token_logp=logp[side],
                ref_token_logp=reference[side],
                mask=mask[side],
                score=batch.scores[side],
                bonus_factor=batch.bonus_factor[side] if weighs else None,
            )
            for side in (slice(0, pairs), slice(pairs, 2 * pairs))
        )
        return chosen, rejected

    def check_finite(self, step: int, values: dict[str, float]) -> None:
        """Explains bonuses that are undefined in the published form."""
        params = self._params
        reason = undefined_bonus(params.design, params.divergence, params.numerics)
        if reason is not None and not any(
            math.isfinite(values[name]) for name in ("loss", "bonus")
        ):
            raise UserError(
                f"the bonus is {values['bonus']} at step {step + 1}: with "
                f"train.numerics 'paper' that of {params.design} under {params.divergence} is "
                f"undefined where {reason}",
                "set train.numerics to 'exact', which is defined everywhere",
            )
        super().check_finite(step, values)
