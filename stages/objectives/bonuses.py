"""The exploratory bonus of a batch of responses.

Shapes: `B` responses, `T` tokens. π of a response is, by `probability`,

    sequence    e^{Σ log p}, as the paper writes it                  log-probs [B]
    token_mean  e^{mean log p}, the geometric mean per token         log-probs [B], num_tokens [B]
    token       each token's own, the bonus averaged over tokens     log-probs [B, T], mask [B, T]

Whatever the choice, it applies alike to log π and to log π_ref, in every design.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from stages.objectives.designs import Terms, check_design
from stages.objectives.divergences import resolve_divergence
from stages.objectives.numerics import check_choice, working_precision
from stages.objectives.published import PUBLISHED_BONUSES, check_published

Probability = Literal["sequence", "token_mean", "token"]
Numerics = Literal["exact", "paper"]


def exploratory_bonus(
    logp: Tensor,
    *,
    design: str,
    divergence: str | float,
    num_tokens: Tensor | None = None,
    mask: Tensor | None = None,
    ref_logp: Tensor | None = None,
    probability: Probability = "sequence",
    numerics: Numerics = "exact",
    beta: float | None = None,
) -> Tensor:
    """L_bonus of each response, which the loss *subtracts*: L − κ · L_bonus (Eq. 3, Eq. 11).

    For GEB's designs of u it is u f′(u) − f(u) = (u^α − 1)/α, log u at α = 0; `inverse_pi` under
    forward KL is −log π. The baselines are as in their authors' code, negated where that adds them.

    Exact numerics give a finite bonus and gradient for log π in [−5000, 0]. Where the true bonus
    has no float (1/π under reverse KL below −88 in float32; log(1−π) at π = 1) it is held at the
    last value that has one, and its gradient is zero: `bonus_saturation` tells which those are.

    Args:
        logp: log π, summed over the response [B]; for probability="token" per token [B, T].
        design: a name in `DESIGNS`.
        divergence: a name in `DIVERGENCES` or α in [0, 1].
        num_tokens: response lengths [B], for probability="token_mean".
        mask: booleans [B, T], true on response tokens, for probability="token". A response without
            tokens has bonus zero.
        ref_logp: log π_ref in the shape of `logp`, for feb, selm, vpo and se_popo.
        probability: which probability enters the bonus; see the module.
        numerics: "exact", or "paper" for the published code's ε forms.
        beta: β of the preference loss, for selm and se_popo.

    Returns:
        Bonuses [B], in float64 for float64 input and float32 otherwise.

    Raises:
        ValueError: an unknown name, a design not defined under the divergence, a missing input, or
            shapes or dtypes that do not fit.
    """
    terms = _elementwise_terms(
        logp, design, divergence, probability, numerics, num_tokens, mask, ref_logp, beta
    )
    key = (design, terms.divergence.name)
    if numerics == "paper" and key in PUBLISHED_BONUSES:
        bonus = PUBLISHED_BONUSES[key](terms.logp)
    else:
        bonus = check_design(design, terms.divergence).bonus(terms)
    if probability != "token" or mask is None:
        return bonus
    return torch.where(mask, bonus, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class BonusSaturation:
    """Responses whose bonus does not explore.

    Attributes:
        clamped: booleans [B]; the true bonus has no float (for probability="token": at some token).
        underflowed: booleans [B]; not clamped, yet the bonus's gradient is exactly zero.
    """

    clamped: Tensor
    underflowed: Tensor


def bonus_saturation(
    logp: Tensor,
    *,
    design: str,
    divergence: str | float,
    num_tokens: Tensor | None = None,
    mask: Tensor | None = None,
    ref_logp: Tensor | None = None,
    probability: Probability = "sequence",
    numerics: Numerics = "exact",
    beta: float | None = None,
) -> BonusSaturation:
    """Tell which responses have a clamped bonus or one without gradient; arguments as in the bonus.

    Design "none" has no bonus that could saturate, so it reports none.
    """
    leaf = working_precision(logp, "logp").detach().requires_grad_()
    terms = _elementwise_terms(
        leaf, design, divergence, probability, numerics, num_tokens, mask, ref_logp, beta
    )
    row = check_design(design, terms.divergence)
    if design == "none":
        idle = torch.zeros(leaf.shape[0], dtype=torch.bool, device=leaf.device)
        return BonusSaturation(clamped=idle, underflowed=idle)
    with torch.enable_grad():
        bonus = exploratory_bonus(
            leaf,
            design=design,
            divergence=divergence,
            num_tokens=num_tokens,
            mask=mask,
            ref_logp=ref_logp,
            probability=probability,
            numerics=numerics,
            beta=beta,
        )
        (gradient,) = torch.autograd.grad(bonus.sum(), leaf)
    without_gradient = gradient == 0.0
    clamped = row.clamped(terms)
    if probability == "token" and mask is not None:
        without_gradient = (without_gradient | ~mask).all(dim=1)
        clamped = (clamped & mask).any(dim=1)
    clamped = clamped.detach() if numerics == "exact" else torch.zeros_like(without_gradient)
    return BonusSaturation(clamped=clamped, underflowed=without_gradient & ~clamped)


def check_bonus(design: str, divergence: str | float, numerics: str, probability: str) -> None:
    """Raise ValueError unless the four choices are known and defined together."""
    check_choice("probability", probability, get_args(Probability))
    check_choice("numerics", numerics, get_args(Numerics))
    resolved = resolve_divergence(divergence)
    check_design(design, resolved)
    if numerics == "paper":
        check_published(design, resolved)


def _elementwise_terms(
    logp: Tensor,
    design: str,
    divergence: str | float,
    probability: str,
    numerics: str,
    num_tokens: Tensor | None,
    mask: Tensor | None,
    ref_logp: Tensor | None,
    beta: float | None,
) -> Terms:
    """Validate the inputs and bring both log-probabilities to the unit that `probability` names."""
    check_bonus(design, divergence, numerics, probability)
    resolved = resolve_divergence(divergence)
    row = check_design(design, resolved)
    if row.needs_ref_logp and ref_logp is None:
        raise ValueError(f"design {design!r} needs ref_logp, log π_ref in the shape of logp")
    if row.needs_beta and (beta is None or not beta > 0.0):
        raise ValueError(
            f"design {design!r} needs beta > 0, the β of the preference loss, got {beta}"
        )
    if ref_logp is not None and (ref_logp.shape != logp.shape):
        raise ValueError(
            f"ref_logp must have the shape of logp {tuple(logp.shape)}, got {tuple(ref_logp.shape)}"
        )
    logp = working_precision(logp, "logp")
    if ref_logp is not None:
        ref_logp = working_precision(ref_logp, "ref_logp")
        if ref_logp.dtype != logp.dtype:
            raise ValueError(
                f"ref_logp is {ref_logp.dtype} but logp is {logp.dtype}: cast one of them"
            )
    return Terms(
        logp=_per_unit(logp, probability, num_tokens, mask),
        ref_logp=None if ref_logp is None else _per_unit(ref_logp, probability, num_tokens, mask),
        beta=beta,
        divergence=resolved,
    )


def _per_unit(
    logp: Tensor, probability: str, num_tokens: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Convert to the log π that `probability` means: [B], or [B, T] made harmless off the mask."""
    if probability == "token":
        if mask is None:
            raise ValueError(
                "probability='token' needs mask, booleans [B, T] true on response tokens"
            )
        if logp.ndim != 2 or mask.shape != logp.shape or mask.dtype != torch.bool:
            raise ValueError(
                "probability='token' needs logp [B, T] and a boolean mask of that shape, got "
                f"{tuple(logp.shape)} and {tuple(mask.shape)} {mask.dtype}"
            )
        return torch.where(mask, logp, -1.0)
    if logp.ndim != 1:
        raise ValueError(
            f"probability={probability!r} needs summed log-probs [B], got {tuple(logp.shape)}"
        )
    if probability == "sequence":
        return logp
    if num_tokens is None or num_tokens.shape != logp.shape:
        got = None if num_tokens is None else tuple(num_tokens.shape)
        raise ValueError(
            f"probability='token_mean' needs num_tokens {tuple(logp.shape)}, got {got}"
        )
    if bool((num_tokens < 1).any()):
        raise ValueError(
            f"num_tokens must be at least 1, got {int(num_tokens.min())}: drop empty responses"
        )
    return logp / num_tokens
