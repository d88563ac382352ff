"""Loss of pairs, and metrics of a step as sums that add over micro-batches and ranks.

    loss, sums = loss_and_metrics(chosen, rejected, params, kappa)   # per micro-batch
    loss.mean().backward()
    sums_of_step += sums
    all_reduce(sums_of_step)                                          # the caller's, if distributed
    log(step_metrics(sums_of_step))

Shapes: `B` pairs, `T` tokens, `M` = len(METRIC_SUMS).
"""

import torch
from torch import Tensor

from stages.objectives.divergences import reward_saturation
from stages.objectives.objective import (
    OwnTerms,
    ResponseLogps,
    geb_objective,
    largest_bonus,
)
from stages.objectives.params import ObjectiveParams

MEANS = (
    "loss",
    "preference_loss",
    "nll",
    "bonus",
    "bonus_clamped_share",
    "bonus_underflowed_share",
    "reward_clamped_share",
    "chosen_logratio",
    "rejected_logratio",
    "chosen_reward",
    "rejected_reward",
    "margin",
)
"""Metrics that are means over pairs; a tied pair's preference loss is zero."""

METRIC_SUMS = (
    "num_pairs",
    "num_preferences",
    *MEANS,
    "accuracy",
    "abs_preference_loss",
    "abs_weighted_bonus",
    "gradient_of_bonus",
    "gradient_of_rest",
)
"""Names of the sums that `loss_and_metrics` gives."""


def loss_and_metrics(
    chosen: ResponseLogps,
    rejected: ResponseLogps,
    params: ObjectiveParams,
    kappa: float,
    tie: Tensor | None = None,
    own_terms: OwnTerms | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluate the objective once, for its loss and for its metrics; waits for no device.

    The gradient entries are Σ|∂(κ·bonus)/∂log π| and Σ|∂(L + weighted NLL)/∂log π| over responses
    (over tokens for probability="token" and for terms of the user's): how hard each pulls at the
    log-probabilities themselves.

    Arguments are as in `geb_objective`, and κ; log π can be differentiated.

    Returns:
        The loss of each pair, [B], attached to the log-probabilities that were given; and sums over
        the pairs, [M] in float64, named by `METRIC_SUMS`, attached to nothing.
    """
    sides = (chosen, rejected)
    output = geb_objective(chosen, rejected, params, tie, own_terms)
    loss = output.loss(kappa)
    weighted_bonus = output.weighted_bonus(kappa)
    rest = output.preference_loss + params.nll_weight * output.nll
    per_token = own_terms or (params.probability == "token" and params.design != "none")
    pulled = [side.token_logp if per_token else side.logp for side in sides]
    clamped, underflowed = (
        torch.stack(masks).double().mean(dim=0)
        for masks in zip(*(bonus.saturation() for bonus in output.bonuses), strict=True)
    )
    beyond = output.bonus.abs() > largest_bonus(kappa, output.bonus.dtype)
    rewards_clamped = [
        reward_saturation(side.compared_logratio(params), divergence=params.divergence).double()
        for side in sides
    ]
    preferred = torch.ones_like(output.bonus, dtype=torch.bool) if tie is None else ~tie
    per_pair = {
        "num_pairs": torch.ones_like(output.bonus),
        "num_preferences": preferred,
        "loss": loss,
        "preference_loss": output.preference_loss,
        "nll": output.nll,
        "bonus": output.bonus,
        "bonus_clamped_share": torch.maximum(clamped, beyond.double()),
        "bonus_underflowed_share": underflowed,
        "reward_clamped_share": torch.stack(rewards_clamped).mean(dim=0),
        "chosen_logratio": chosen.logratio,
        "rejected_logratio": rejected.logratio,
        "chosen_reward": output.chosen_reward,
        "rejected_reward": output.rejected_reward,
        "margin": output.margin,
        "accuracy": preferred & (output.margin > 0.0),
        "abs_preference_loss": output.preference_loss.abs(),
        "abs_weighted_bonus": weighted_bonus.abs(),
    }
    sums = {name: values.detach().double().sum() for name, values in per_pair.items()}
    sums["gradient_of_bonus"] = _absolute_gradient(weighted_bonus, pulled)
    sums["gradient_of_rest"] = _absolute_gradient(rest, pulled)
    return loss, torch.stack([sums[name] for name in METRIC_SUMS])


def step_metrics(sums: Tensor) -> dict[str, float]:
    """Turn added-up sums of `loss_and_metrics` [M] into the metrics of a step.

    Returns:
        The means in `MEANS`; `accuracy`, the share of untied pairs whose margin is positive (0
        if all are tied); `bonus_ratio`, mean |κ·bonus| over mean |L|; and
        `bonus_gradient_share`, the bonus's part of the summed absolute gradients, in [0, 1]
        (0 if both are zero).
    """
    value = dict(zip(METRIC_SUMS, sums.tolist(), strict=True))
    metrics = {name: value[name] / value["num_pairs"] for name in MEANS}
    metrics["accuracy"] = _ratio(value["accuracy"], value["num_preferences"])
    metrics["bonus_ratio"] = _ratio(value["abs_weighted_bonus"], value["abs_preference_loss"])
    metrics["bonus_gradient_share"] = _ratio(
        value["gradient_of_bonus"], value["gradient_of_bonus"] + value["gradient_of_rest"]
    )
    return metrics


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0


def _absolute_gradient(term: Tensor, leaves: list[Tensor]) -> Tensor:
    gradients = torch.autograd.grad(term.sum(), leaves, retain_graph=True, allow_unused=True)
    total = torch.zeros((), dtype=torch.float64, device=term.device)
    for gradient in gradients:
        if gradient is not None:
            total = total + gradient.double().abs().sum()
    return total
