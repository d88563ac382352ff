"""The whole objective of a batch of preference pairs: what the train stage minimises.

    terms = geb_objective(chosen, rejected, settings)
    loss = terms.loss(kappa).mean()

Shapes: `B` pairs, `T` tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from stages.objectives.bonuses import Bonus, BonusInputs, BonusValues, Numerics, Probability
from stages.objectives.divergences import implicit_reward
from stages.objectives.losses import check_loss_parameters, preference_loss
from stages.objectives.numerics import check_choice, working_precision

BonusOn = Literal["rejected", "all", "chosen"]

LARGEST_WEIGHTED_BONUS_FRACTION = 2.0**-20
"""Share of the largest float that κ·bonus may reach: a batch of them still has a finite mean."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """Choice of the objective. Checked when it is made: a combination that exists is defined.

    Attributes:
        divergence: a name in `DIVERGENCES` or α in [0, 1].
        design: the exploratory bonus, a name in `DESIGNS`.
        probability: "sequence", "token_mean" or "token" (see `bonuses`).
        numerics: "exact", or "paper" for the published code's ε forms.
        beta: β > 0 of the preference loss.
        label_smoothing: probability in [0, 0.5] that a label is wrong.
        nll_weight: weight ≥ 0 of the length-normalised NLL of the chosen response.
        bonus_on: the responses that get the bonus; "all" is the mean of a pair's two bonuses.
        length_normalised: whether the preference loss takes log-ratios per token.
    """

    divergence: str | float = "reverse_kl"
    design: str = "none"
    probability: Probability = "sequence"
    numerics: Numerics = "exact"
    beta: float = 0.1
    label_smoothing: float = 0.0
    nll_weight: float = 0.0
    bonus_on: BonusOn = "rejected"
    length_normalised: bool = False

    def __post_init__(self) -> None:
        check_loss_parameters(self.beta, self.label_smoothing)
        assert self.bonus is not None, "made once, and with it checked"
        if not self.nll_weight >= 0.0:
            raise ValueError(f"nll_weight must not be negative, got {self.nll_weight}")
        check_choice("bonus_on", self.bonus_on, get_args(BonusOn))

    @cached_property
    def bonus(self) -> Bonus:
        """The exploratory bonus; without a design, π and its unit do not matter."""
        probability = "sequence" if self.design == "none" else self.probability
        check_choice("probability", self.probability, get_args(Probability))
        return Bonus.of(
            self.design,
            self.divergence,
            probability=probability,
            numerics=self.numerics,
            beta=self.beta,
        )

    @property
    def needs_token_logps(self) -> bool:
        """True where the target responses must bring per-token log-probabilities."""
        return self.bonus.probability == "token"

    @property
    def needs_ref_token_logps(self) -> bool:
        """True where they must bring the reference's per-token log-probabilities as well."""
        return self.needs_token_logps and self.bonus.design.needs_ref_logp

    @property
    def bonus_targets(self) -> tuple[Literal["chosen", "rejected"], ...]:
        """The sides of a pair that get the bonus."""
        return ("chosen", "rejected") if self.bonus_on == "all" else (self.bonus_on,)


@dataclass(frozen=True)
class ResponseLogps:
    """Log-probabilities of one side of a batch of pairs, under the policy and under the reference.

    Attributes:
        logp: log π summed over response tokens, [B].
        ref_logp: log π_ref, [B].
        num_tokens: response lengths [B], at least 1; for "token_mean", for an `nll_weight` and for
            `length_normalised`.
        token_logp: log π per token [B, T]; for "token", on the sides that get the bonus.
        token_mask: booleans [B, T], true on response tokens; with `token_logp`.
        ref_token_logp: log π_ref per token [B, T]; where the design depends on π_ref as well.
    """

    logp: Tensor
    ref_logp: Tensor
    num_tokens: Tensor | None = None
    token_logp: Tensor | None = None
    token_mask: Tensor | None = None
    ref_token_logp: Tensor | None = None

    @property
    def logratio(self) -> Tensor:
        """The difference log π − log π_ref, [B], in float32 or float64."""
        if self.logp.dtype not in (torch.float32, torch.float64):
            return self.logp.float() - self.ref_logp.float()
        return self.logp - self.ref_logp


@dataclass(frozen=True)
class ObjectiveOutput:
    """The terms of the objective per pair; all tensors [B].

    Attributes:
        preference_loss: the f-DPO loss.
        bonuses: L_bonus of the responses of each side that gets it, before κ.
        nll: length-normalised negative log-likelihood of the chosen response; 0 without a weight.
        nll_weight: its weight.
        chosen_logratio: log π − log π_ref of the chosen responses.
        rejected_logratio: the same of the rejected ones.
        chosen_reward: β f′(π/π_ref) of the chosen responses, per token if length-normalised.
        rejected_reward: the same of the rejected ones.
    """

    preference_loss: Tensor
    bonuses: tuple[BonusValues, ...]
    nll: Tensor
    nll_weight: float
    chosen_logratio: Tensor
    rejected_logratio: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor

    @cached_property
    def bonus(self) -> Tensor:
        """L_bonus of each pair, [B]: the mean over its target responses."""
        values = [each.value for each in self.bonuses]
        return torch.stack(values).mean(dim=0) if len(values) > 1 else values[0]

    @property
    def margin(self) -> Tensor:
        """Difference of the implicit rewards, [B]."""
        return self.chosen_reward - self.rejected_reward

    def weighted_bonus(self, kappa: float) -> Tensor:
        """κ · L_bonus of each pair, [B], held constant where a batch's mean would overflow."""
        limit = largest_bonus(kappa, self.bonus.dtype)
        return kappa * self.bonus.clamp(-limit, limit)

    def loss(self, kappa: float) -> Tensor:
        """L − κ · L_bonus + weighted NLL of each pair, [B] (Algorithm 1, line 5)."""
        return self.preference_loss - self.weighted_bonus(kappa) + self.nll_weight * self.nll


def largest_bonus(kappa: float, dtype: torch.dtype) -> float:
    """Largest |L_bonus| that enters the loss unchanged under weight κ."""
    largest = torch.finfo(dtype).max
    return min(largest, largest * LARGEST_WEIGHTED_BONUS_FRACTION / max(abs(kappa), 1e-30))


def geb_objective(
    chosen: ResponseLogps,
    rejected: ResponseLogps,
    settings: ObjectiveSettings,
    tie: Tensor | None = None,
) -> ObjectiveOutput:
    """Evaluate preference loss, exploratory bonus and NLL of each pair.

    Args:
        chosen: the preferred responses.
        rejected: the other ones, in the same order.
        settings: the objective.
        tie: booleans [B]; a pair of which neither response is preferred has no preference loss.

    Returns:
        The terms per pair; `loss(kappa)` combines them.

    Raises:
        ValueError: a log-probability the settings need is missing, or shapes do not fit.
    """
    sides = {"chosen": chosen, "rejected": rejected}
    compared = {name: compared_logratio(side, settings) for name, side in sides.items()}
    loss = preference_loss(
        compared["chosen"],
        compared["rejected"],
        beta=settings.beta,
        divergence=settings.divergence,
        label_smoothing=settings.label_smoothing,
    )
    if tie is not None:
        loss = loss.masked_fill(tie, 0.0)
    bonuses = [
        settings.bonus(_bonus_inputs(sides[name], settings)) for name in settings.bonus_targets
    ]
    reward = {
        name: settings.beta * implicit_reward(logratio, divergence=settings.divergence)
        for name, logratio in compared.items()
    }
    return ObjectiveOutput(
        preference_loss=loss,
        bonuses=tuple(bonuses),
        nll=_mean_nll(chosen) if settings.nll_weight > 0.0 else torch.zeros_like(loss),
        nll_weight=settings.nll_weight,
        chosen_logratio=chosen.logratio,
        rejected_logratio=rejected.logratio,
        chosen_reward=reward["chosen"],
        rejected_reward=reward["rejected"],
    )


def compared_logratio(side: ResponseLogps, settings: ObjectiveSettings) -> Tensor:
    """Log-ratios of which the preference loss takes the implicit rewards, [B].

    Per token they are those of length-normalised DPO (arXiv 2411.15124), and under
    every divergence those of the geometric mean of π/π_ref per token.
    """
    if not settings.length_normalised:
        return side.logratio
    if side.num_tokens is None:
        raise ValueError("length_normalised needs num_tokens [B] of both responses")
    return side.logratio / side.num_tokens


def _bonus_inputs(side: ResponseLogps, settings: ObjectiveSettings) -> BonusInputs:
    """The log-probabilities of one side that its bonus is a function of."""
    if not settings.needs_token_logps:
        return BonusInputs(side.logp, side.ref_logp, side.num_tokens)
    if side.token_logp is None or side.token_mask is None:
        raise ValueError(
            "probability='token' needs token_logp and token_mask [B, T] on the responses that get "
            f"the bonus (bonus_on={settings.bonus_on!r})"
        )
    if settings.needs_ref_token_logps and side.ref_token_logp is None:
        raise ValueError(
            f"design {settings.design!r} with probability='token' needs ref_token_logp [B, T]"
        )
    return BonusInputs(side.token_logp, side.ref_token_logp, mask=side.token_mask)


def _mean_nll(side: ResponseLogps) -> Tensor:
    """−log π per token, [B]."""
    if side.num_tokens is None:
        raise ValueError("nll_weight needs num_tokens [B] of the chosen responses")
    return -working_precision(side.logp, "logp") / side.num_tokens
