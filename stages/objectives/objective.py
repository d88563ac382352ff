"""The whole objective of a batch of preference pairs: what the train stage minimises.

    terms = geb_objective(chosen, rejected, params)
    loss = terms.loss(kappa).mean()

Shapes: `B` pairs, `T` tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stages.objectives.bonuses import Bonus, exploratory_bonus, without_saturation
from stages.objectives.divergences import implicit_reward
from stages.objectives.losses import LOSSES
from stages.objectives.numerics import working_precision
from stages.objectives.params import ObjectiveParams

LARGEST_WEIGHTED_BONUS_FRACTION = 2.0**-20
"""Share of the largest float that κ·bonus may reach: a batch of them still has a finite mean."""


@dataclass(frozen=True)
class ResponseLogps:
    """Log-probabilities of one side of a batch of pairs, under policy and reference."""

    token_logp: Tensor
    """log π per token, [B, T]."""
    ref_token_logp: Tensor
    """log π_ref per token, [B, T]."""
    mask: Tensor
    """Booleans [B, T], true on response tokens; each response has one at least."""
    score: Tensor | None = None
    """The oracle's scores, [B]; None if they are not known."""

    @cached_property
    def logp(self) -> Tensor:
        """Log π of each response, [B]."""
        return torch.where(self.mask, self.token_logp, 0.0).sum(dim=1)

    @cached_property
    def ref_logp(self) -> Tensor:
        """Log π_ref of each response, [B]."""
        return torch.where(self.mask, self.ref_token_logp, 0.0).sum(dim=1)

    @cached_property
    def num_tokens(self) -> Tensor:
        """Lengths of the responses, [B]."""
        return self.mask.sum(dim=1)

    @property
    def logratio(self) -> Tensor:
        """The difference log π − log π_ref, [B], in float32 or float64."""
        return working_precision(self.logp) - working_precision(self.ref_logp)

    def compared_logratio(self, params: ObjectiveParams) -> Tensor:
        """Log-ratios of which the preference loss takes the implicit rewards, [B].

        Per token they are log-ratios as in length-normalised DPO (arXiv 2411.15124): under every
        divergence, of the geometric mean of π/π_ref per token.
        """
        return self.logratio / self.num_tokens if params.length_normalised else self.logratio

    def bonus(self, params: ObjectiveParams) -> Bonus:
        """The exploratory bonus of each response."""
        per_token = params.probability == "token"
        return exploratory_bonus(
            self.token_logp if per_token else self.logp,
            self.ref_token_logp if per_token else self.ref_logp,
            params,
            num_tokens=self.num_tokens,
            mask=self.mask,
        )


@dataclass(frozen=True)
class ObjectiveOutput:
    """The terms of the objective per pair; all tensors [B]."""

    preference_loss: Tensor
    """The f-DPO loss."""
    bonuses: tuple[Bonus, ...]
    """L_bonus of the responses of each side that gets it, before κ."""
    nll: Tensor
    """Length-normalised negative log-likelihood of the chosen response; 0 without a weight."""
    nll_weight: float
    chosen_reward: Tensor
    """β f′(π/π_ref) of the chosen responses, per token if length-normalised."""
    rejected_reward: Tensor
    """The same of the rejected ones."""

    @cached_property
    def bonus(self) -> Tensor:
        """L_bonus of each pair, [B]: the mean over its target responses."""
        values = [bonus.value for bonus in self.bonuses]
        return torch.stack(values).mean(dim=0) if len(values) > 1 else values[0]

    @property
    def margin(self) -> Tensor:
        """Difference of the implicit rewards, [B]."""
        return self.chosen_reward - self.rejected_reward

    def weighted_bonus(self, kappa: float) -> Tensor:
        """κ · L_bonus of each pair, [B], clamped where a batch's mean would overflow."""
        limit = largest_bonus(kappa, self.bonus.dtype)
        return kappa * self.bonus.clamp(-limit, limit)

    def loss(self, kappa: float) -> Tensor:
        """L − κ · L_bonus + weighted NLL of each pair, [B] (Algorithm 1, line 5)."""
        return self.preference_loss - self.weighted_bonus(kappa) + self.nll_weight * self.nll


def largest_bonus(kappa: float, dtype: torch.dtype) -> float:
    """Largest |L_bonus| that enters the loss unchanged under weight κ."""
    largest = torch.finfo(dtype).max
    return min(largest, largest * LARGEST_WEIGHTED_BONUS_FRACTION / max(abs(kappa), 1e-30))


def preference_loss(
    chosen_logratio: Tensor,
    rejected_logratio: Tensor,
    *,
    beta: float,
    divergence: str | float,
    label_smoothing: float = 0.0,
    loss: str = "sigmoid",
) -> Tensor:
    """Preference loss of each pair: by default f-DPO's −log σ(β (f′_chosen − f′_rejected)).

    Label smoothing ε takes each label to be wrong with probability ε: (1−ε) L(z) + ε L(−z), z the
    margin. From logratios log π − log π_ref, [B], to losses [B], in float32 or float64.

    Args:
        chosen_logratio: log-ratios of the chosen responses.
        rejected_logratio: log-ratios of the rejected responses.
        beta: β > 0, the strength of the divergence penalty.
        divergence: a name in `DIVERGENCES` or α in [0, 1].
        label_smoothing: ε in [0, 0.5].
        loss: a name in `LOSSES`.
    """
    chosen_reward = implicit_reward(chosen_logratio, divergence=divergence)
    rejected_reward = implicit_reward(rejected_logratio, divergence=divergence)
    margin = beta * (chosen_reward - rejected_reward)
    of_margin = LOSSES[loss]
    if label_smoothing == 0.0:
        return of_margin(margin, beta)
    wrong = of_margin(-margin, beta)
    return (1.0 - label_smoothing) * of_margin(margin, beta) + label_smoothing * wrong


OwnTerms = Callable[[ResponseLogps, ResponseLogps], Mapping[str, Tensor]]
"""(chosen, rejected) → terms of an objective of the user's: `loss` and `bonus`, or one of them,
both [B]. What it leaves out is as the settings say."""


def geb_objective(
    chosen: ResponseLogps,
    rejected: ResponseLogps,
    params: ObjectiveParams,
    tie: Tensor | None = None,
    own_terms: OwnTerms | None = None,
) -> ObjectiveOutput:
    """Evaluate preference loss, exploratory bonus and NLL of each pair.

    Args:
        chosen: the preferred responses.
        rejected: the other ones, in the same order.
        params: the objective.
        tie: booleans [B]; a pair of which neither response is preferred has no preference loss.
        own_terms: terms that replace the settings' terms.
    """
    terms = own_terms(chosen, rejected) if own_terms else {}
    compared = [side.compared_logratio(params) for side in (chosen, rejected)]
    loss = (
        terms["loss"]
        if "loss" in terms
        else preference_loss(
            *compared,
            beta=params.beta,
            divergence=params.divergence,
            label_smoothing=params.label_smoothing,
            loss=params.loss,
        )
    )
    if tie is not None:
        loss = loss.masked_fill(tie, 0.0)
    if "bonus" in terms:
        bonuses: tuple[Bonus, ...] = (without_saturation(terms["bonus"]),)
    else:
        targets = {"chosen": (chosen,), "rejected": (rejected,), "all": (chosen, rejected)}
        bonuses = tuple(side.bonus(params) for side in targets[params.bonus_on])
    rewards = [
        params.beta * implicit_reward(logratio, divergence=params.divergence)
        for logratio in compared
    ]
    # Last: gradients add up in the order of the terms, and their sum rounds by it.
    nll = -working_precision(chosen.logp) / chosen.num_tokens
    return ObjectiveOutput(
        preference_loss=loss,
        bonuses=bonuses,
        nll=nll if params.nll_weight > 0.0 else torch.zeros_like(loss),
        nll_weight=params.nll_weight,
        chosen_reward=rewards[0],
        rejected_reward=rewards[1],
    )
