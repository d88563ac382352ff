"""κ, the weight of the bonus: a schedule, and its calibration to a target ratio |κ · bonus| / |L|.

The paper reports κ by that ratio, because the bonus's scale differs by orders of magnitude between
designs (section 5, "The choice of κ").
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from stages.objectives.numerics import check_choice

ScheduleKind = Literal["constant", "linear", "cosine", "per_iteration"]

CALIBRATION_BATCHES = 8
"""Batches whose losses and bonuses set κ when a target ratio is asked for."""


@dataclass(frozen=True)
class KappaSchedule:
    """κ over a run.

    Attributes:
        kappa: κ ≥ 0 at the start of an iteration; multiplied by the factor of a calibration.
        kind: "constant"; "linear" or "cosine" decay over the steps of one iteration down to
            `final_fraction` of the start; "per_iteration", one constant of `values` per iteration.
        final_fraction: share of κ at the last step, in [0, 1].
        values: for "per_iteration": κ of iterations 1, 2, …; the last one stays.
    """

    kappa: float = 1.0
    kind: ScheduleKind = "constant"
    final_fraction: float = 0.0
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_choice("kappa schedule", self.kind, get_args(ScheduleKind))
        for value in (self.kappa, *self.values):
            if not (value >= 0.0 and math.isfinite(value)):
                raise ValueError(f"kappa must be finite and not negative, got {value}")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ValueError(f"final_fraction must be in [0, 1], got {self.final_fraction}")
        if (self.kind == "per_iteration") != bool(self.values):
            raise ValueError(
                f"kappa schedule {self.kind!r} with values {self.values}: values belong to "
                "'per_iteration', which needs at least one"
            )

    def at(self, *, step: int, num_steps: int, iteration: int = 1) -> float:
        """κ at `step` (0 … num_steps − 1) of an iteration counted from 1.

        Raises:
            ValueError: the step or the iteration is out of range.
        """
        if not 0 <= step < num_steps or iteration < 1:
            raise ValueError(
                f"step {step} of {num_steps} in iteration {iteration}: "
                "steps count from 0, iterations from 1"
            )
        if self.kind == "per_iteration":
            return self.values[min(iteration, len(self.values)) - 1]
        progress = step / max(1, num_steps - 1)
        remaining = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }[self.kind]
        if self.kind == "constant":
            return self.kappa
        return self.kappa * (self.final_fraction + (1.0 - self.final_fraction) * remaining)


class KappaController:
    """κ of each step: the schedule, times a factor calibrated on the first batches if asked for.

    With a target ratio ρ the factor is ρ · Σ|L| / Σ|bonus| over the batches seen so far, until
    `calibration_batches` of them were seen; then it stays. Without one it is 1.

    In data-parallel training every rank must pass the same, all-reduced sums to `observe`.
    """

    def __init__(
        self,
        schedule: KappaSchedule,
        *,
        target_ratio: float | None = None,
        calibration_batches: int = CALIBRATION_BATCHES,
    ) -> None:
        """Start uncalibrated.

        Args:
            schedule: κ over the run.
            target_ratio: ρ > 0, the wanted |κ · bonus| / |L|; None leaves κ to the schedule.
            calibration_batches: how many batches set the factor, at least 1.

        Raises:
            ValueError: an argument is out of range.
        """
        if target_ratio is not None and not (target_ratio > 0.0 and math.isfinite(target_ratio)):
            raise ValueError(f"target_ratio must be positive and finite, got {target_ratio}")
        if calibration_batches < 1:
            raise ValueError(f"calibration_batches must be at least 1, got {calibration_batches}")
        self.schedule = schedule
        self.target_ratio = target_ratio
        self.calibration_batches = calibration_batches
        self._num_observed = 0
        self._loss_sum = 0.0
        self._bonus_sum = 0.0

    @property
    def calibrating(self) -> bool:
        """True while `observe` changes κ."""
        return self.target_ratio is not None and self._num_observed < self.calibration_batches

    def observe(self, *, abs_loss_sum: float, abs_bonus_sum: float) -> None:
        """Take in Σ|L| and Σ|bonus| of one batch; does nothing once calibrated.

        Raises:
            ValueError: no finite κ meets the target, as the bonus is zero or a sum is not finite;
                or, at the last of the batches, κ would be 0, as all their pairs are ties.
        """
        if not self.calibrating:
            return
        loss_sum, bonus_sum = self._loss_sum + abs_loss_sum, self._bonus_sum + abs_bonus_sum
        if not (math.isfinite(loss_sum) and math.isfinite(bonus_sum)) or bonus_sum == 0.0:
            raise ValueError(
                f"target_ratio {self.target_ratio} cannot be met: over the first batches |L| sums "
                f"to {loss_sum} and |bonus| to {bonus_sum}. Set kappa itself, or choose "
                "probability='token' if the bonus underflows"
            )
        is_last = self._num_observed + 1 == self.calibration_batches
        if is_last and loss_sum == 0.0:
            raise ValueError(
                f"target_ratio {self.target_ratio} cannot be met: over the first "
                f"{self.calibration_batches} batches |L| sums to 0, since all their pairs are "
                "ties, and a bonus of any weight is more. Set kappa itself"
            )
        self._loss_sum, self._bonus_sum = loss_sum, bonus_sum
        self._num_observed += 1

    def kappa(self, *, step: int, num_steps: int, iteration: int = 1) -> float:
        """κ at a step; see `KappaSchedule.at`.

        Raises:
            ValueError: a target ratio is set and no batch was observed yet.
        """
        return self._factor() * self.schedule.at(
            step=step, num_steps=num_steps, iteration=iteration
        )

    def _factor(self) -> float:
        if self.target_ratio is None:
            return 1.0
        if self._num_observed == 0:
            raise ValueError("target_ratio needs one observed batch before the first κ")
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
