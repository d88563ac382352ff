"""Loss of preference pairs: objective, κ, and metrics of a step.

Shapes: `B` pairs of a micro-batch, `S` tokens of a response.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.objectives.kappa import KappaController
from stages.objectives.metrics import METRIC_SUMS, loss_and_metrics, step_metrics
from stages.objectives.objective import OwnTerms, ResponseLogps, geb_objective
from stages.train.data import Pair, PairBatch, RefLogprobs, make_pair_batch
from stages.train.params import TrainParams
from stages.training.engine import Engine, Process
from stages.training.loop import Objective


@dataclass
class PairObjective(Objective[PairBatch]):
    """The mean over a global batch's pairs of L − κ · L_bonus + weighted NLL."""

    num_sums = len(METRIC_SUMS)
    remedy = (
        "lower train.learning_rate or train.kappa, choose another train.design, or set "
        "train.numerics to 'exact', whose bonus has a value at every π"
    )
    engine: Engine
    process: Process
    params: TrainParams
    kappa_controller: KappaController
    custom_terms: OwnTerms | None
    ref_logprobs: RefLogprobs
    step_kappa: float = 0.0

    def make_batch(self, samples: Sequence[Pair], **fields: Any) -> PairBatch:
        """A micro-batch of pairs."""
        return make_pair_batch(self.ref_logprobs, samples, **fields)

    def before_step(self, batches: list[PairBatch]) -> None:
        """Settles the step's κ."""
        if self.kappa_controller.calibrating:
            self._calibrate(batches)
        self.step_kappa = self.kappa_controller.kappa()

    def micro_loss(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """The sum of the pairs' losses, and the sums of their metrics."""
        loss, sums = loss_and_metrics(
            *self._responses(batch), self.params, self.step_kappa, batch.tie, self.custom_terms
        )
        return loss.sum(), sums

    def step_record(self, sums: Tensor) -> dict[str, float]:
        """The objective's metrics, κ, and the number of pairs."""
        num_pairs = sums[METRIC_SUMS.index("num_pairs")].item()
        return {**step_metrics(sums), "kappa": self.step_kappa, "num_pairs": num_pairs}

    def state(self) -> dict[str, Any]:
        """κ's calibration."""
        return {"kappa": self.kappa_controller.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes κ's calibration."""
        self.kappa_controller.load_state_dict(state["kappa"])

    def _calibrate(self, batches: list[PairBatch]) -> None:
        """Shows κ's controller |L| and |bonus| of the coming step, from an extra pass."""
        device = self.engine.device
        absolute = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for micro_batch in batches:
                batch = micro_batch.to(device)
                # Even if no pair is left for this process: the forward pass is collective.
                chosen, rejected = self._responses(batch)
                output = geb_objective(chosen, rejected, self.params, batch.tie, self.custom_terms)
                if batch.weight > 0.0:
                    terms = (output.preference_loss, output.bonus)
                    absolute += torch.stack([term.abs().double().sum() for term in terms])
        loss_sum, bonus_sum = self.process.sum(absolute).tolist()
        self.kappa_controller.observe(abs_loss_sum=loss_sum, abs_bonus_sum=bonus_sum)
        if self.kappa_controller.vanished:
            self.process.events.warning(
                "the bonus of all pairs is exactly 0 in the batches that set κ: at such "
                "log-probabilities the published form underflows, and training goes on without a "
                "bonus, as the published code does; train.numerics=exact with "
                "train.probability=token has one"
            )

    def _responses(self, batch: PairBatch) -> tuple[ResponseLogps, ResponseLogps]:
        logp = batch.rows.pad_responses(self.engine.logprobs(batch.rows))
        return batch.sides(logp)
