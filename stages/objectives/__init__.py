"""The mathematics of GEB: divergences, exploratory bonuses and losses (docs/equations.md).

Pure functions of log-probabilities, per sequence; the caller reduces. Needs torch, nothing else.
"""

from stages.objectives.bonuses import (
    Bonus,
    BonusInputs,
    exploratory_bonus,
    undefined_bonus,
)
from stages.objectives.designs import DESIGNS
from stages.objectives.divergences import DIVERGENCES, implicit_reward, reward_saturation
from stages.objectives.kappa import KappaController, KappaSchedule
from stages.objectives.losses import preference_loss
from stages.objectives.metrics import METRIC_SUMS, loss_and_metrics, step_metrics
from stages.objectives.objective import (
    ObjectiveOutput,
    ObjectiveSettings,
    ResponseLogps,
    geb_objective,
)

__all__ = [
    "DESIGNS",
    "DIVERGENCES",
    "METRIC_SUMS",
    "Bonus",
    "BonusInputs",
    "KappaController",
    "KappaSchedule",
    "ObjectiveOutput",
    "ObjectiveSettings",
    "ResponseLogps",
    "exploratory_bonus",
    "geb_objective",
    "implicit_reward",
    "loss_and_metrics",
    "preference_loss",
    "reward_saturation",
    "step_metrics",
    "undefined_bonus",
]
