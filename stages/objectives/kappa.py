"""κ, the weight of the bonus: a number, or calibrated to a target ratio |κ · bonus| / |L|.

The paper reports κ by that ratio, because the bonus's scale differs by orders of magnitude between
designs (section 5, "The choice of κ").
"""

import math

from stages.contract.errors import UserError
from stages.objectives.params import KappaParams

CALIBRATION_BATCHES = 8
"""Global batches that set κ if a target ratio is set."""


class KappaController:
    """κ of each step: a number, or calibrated on the first batches.

    A target ratio ρ gives ρ · Σ|L| / Σ|bonus| over the batches seen so far, until
    `CALIBRATION_BATCHES` of them were seen; then it stays.

    In data-parallel training every rank must pass the same, all-reduced sums to `observe`.
    """

    def __init__(
        self, params: KappaParams, *, has_bonus: bool = True, may_vanish: bool = False
    ) -> None:
        """Start uncalibrated; without a bonus, as for f-DPO, nothing is calibrated.

        `may_vanish` trains on a bonus that is 0 on all batches, with κ = 0, as the published code
        does where its bonus underflows.
        """
        self._params = params
        self._may_vanish = may_vanish
        self.target_ratio = params.target_ratio if has_bonus else None
        self._num_observed = 0
        self._loss_sum = 0.0
        self._bonus_sum = 0.0

    @property
    def calibrating(self) -> bool:
        """True while `observe` changes κ."""
        return self.target_ratio is not None and self._num_observed < CALIBRATION_BATCHES

    @property
    def vanished(self) -> bool:
        """True if the bonus was 0 on all batches of the calibration."""
        return self.target_ratio is not None and not self.calibrating and self._bonus_sum == 0.0

    def observe(self, *, abs_loss_sum: float, abs_bonus_sum: float) -> None:
        """Take in Σ|L| and Σ|bonus| of one batch; does nothing once calibrated.

        Raises:
            UserError: no finite κ meets the target, as the bonus is zero or a sum is not finite;
                or, at the last of the batches, κ would be 0, as all their pairs are ties.
        """
        if not self.calibrating:
            return
        loss_sum = self._loss_sum + abs_loss_sum
        bonus_sum = self._bonus_sum + abs_bonus_sum
        is_zero = bonus_sum == 0.0 and not self._may_vanish
        is_last = self._num_observed + 1 == CALIBRATION_BATCHES
        if not math.isfinite(loss_sum + bonus_sum) or is_zero or (is_last and loss_sum == 0.0):
            raise UserError(
                f"target_ratio {self.target_ratio} cannot be met: over the first batches |L| sums "
                f"to {loss_sum} (0 if all pairs are ties) and |bonus| to {bonus_sum}",
                "set train.kappa and unset train.target_ratio, or set train.probability='token' "
                "if the bonus underflows",
            )
        self._loss_sum = loss_sum
        self._bonus_sum = bonus_sum
        self._num_observed += 1

    def kappa(self) -> float:
        """κ of the coming step."""
        if self.target_ratio is None:
            return self._params.kappa_or_default()
        assert self._num_observed, "a batch is observed before the first κ"
        if self._bonus_sum == 0.0:
            return 0.0
        return self.target_ratio * self._loss_sum / self._bonus_sum

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint: three numbers."""
        return {
            "num_observed": self._num_observed,
            "loss_sum": self._loss_sum,
            "bonus_sum": self._bonus_sum,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take up a state from `state_dict`."""
        self._num_observed = int(state["num_observed"])
        self._loss_sum = float(state["loss_sum"])
        self._bonus_sum = float(state["bonus_sum"])
