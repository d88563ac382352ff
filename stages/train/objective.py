"""Loss of preference pairs: objective, κ, and metrics of a step.

Shapes: `B` pairs of a micro-batch, `S` tokens of a response.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.modeling.shared_prefix import on_device
from stages.objectives.kappa import KappaController
from stages.objectives.objective import OwnTerms, ResponseLogps, geb_objective
from stages.objectives.pair_loss import METRIC_SUMS, loss_and_metrics, step_metrics
from stages.train.data import Pair, RefLogprobs, padded_logprobs
from stages.train.params import TrainParams
from stages.training.batches import Batch
from stages.training.engine import Engine, Process
from stages.training.loop import Objective


@dataclass
class PairObjective(Objective[Pair]):
    """The mean over a global batch's pairs of L − κ · L_bonus + weighted NLL."""

    remedy = (
        "lower train.learning_rate or train.kappa, choose another train.design, or set "
        "train.numerics to 'exact', whose bonus has a value at every π"
    )
    num_sums = len(METRIC_SUMS)
    engine: Engine
    process: Process
    params: TrainParams
    kappa_controller: KappaController
    own_terms: OwnTerms | None
    ref_logprobs: RefLogprobs
    step_kappa: float = 0.0

    def before_step(self, batches: Sequence[Batch[Pair]]) -> None:
        """Settles the step's κ."""
        if self.kappa_controller.calibrating:
            self._calibrate(batches)
        self.step_kappa = self.kappa_controller.kappa()

    def micro_loss(self, samples: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """The sum of the pairs' losses, and the sums of their metrics."""
        chosen, rejected, tie = self._forward(samples)
        loss, sums = loss_and_metrics(
            chosen, rejected, self.params, self.step_kappa, tie, self.own_terms
        )
        return loss.sum(), sums

    def step_record(self, sums: Tensor) -> dict[str, float]:
        """The objective's metrics, κ, and the number of pairs."""
        num_pairs = int(sums[METRIC_SUMS.index("num_pairs")])
        return {**step_metrics(sums), "kappa": self.step_kappa, "num_pairs": num_pairs}

    def state(self) -> dict[str, Any]:
        """κ's calibration."""
        return {"kappa": self.kappa_controller.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes κ's calibration."""
        self.kappa_controller.load_state_dict(state["kappa"])

    def _calibrate(self, batches: Sequence[Batch[Pair]]) -> None:
        """Shows κ's controller |L| and |bonus| of the coming step, from an extra pass."""
        absolute = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        with torch.no_grad():
            for batch in batches:
                # Even if no pair is left for this process: the forward pass is collective.
                chosen, rejected, tie = self._forward(batch.samples)
                output = geb_objective(chosen, rejected, self.params, tie, self.own_terms)
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

    def _forward(self, pairs: Sequence[Pair]) -> tuple[ResponseLogps, ResponseLogps, Tensor]:
        """Chosen and rejected responses with their log π, and which pairs are ties: [B]."""
        device = self.engine.device
        rows = self.engine.rows(pairs)
        responses = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        columns = (
            rows.pad_responses(self.engine.logprobs(rows)),
            on_device(padded_logprobs(pairs, self.ref_logprobs), device),
            rows.response_mask,
            on_device(torch.tensor([response.score for response in responses]), device),
        )
        chosen, rejected = zip(*(column.chunk(2) for column in columns), strict=True)
        tie = on_device(torch.tensor([pair.tie for pair in pairs]), device)
        return ResponseLogps(*chosen), ResponseLogps(*rejected), tie
