"""The exploratory bonus of a batch of responses.

Shapes: `B` responses, `T` tokens. π of a response is, by `probability`,

    sequence    e^{Σ log p}, as the paper writes it                  log-probs [B]
    token_mean  e^{mean log p}, the geometric mean per token         log-probs [B], num_tokens [B]
    token       each token's own, the bonus averaged over tokens     log-probs [B, T], mask [B, T]

Whatever the choice, it applies alike to log π and to log π_ref, in every design.
"""

from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from stages.objectives.designs import Design, Terms, check_design
from stages.objectives.divergences import Divergence, resolve_divergence
from stages.objectives.numerics import check_choice, working_precision
from stages.objectives.published import PUBLISHED_BONUSES, UNDEFINED, check_published

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
    last value that has one, and its gradient is zero: `BonusValues.saturation` tells which.

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
    if probability == "token_mean" and num_tokens is not None and bool((num_tokens < 1).any()):
        raise ValueError(
            f"num_tokens must be at least 1, got {int(num_tokens.min())}: drop empty responses"
        )
    bonus = Bonus.of(design, divergence, probability=probability, numerics=numerics, beta=beta)
    return bonus(BonusInputs(logp, ref_logp, num_tokens, mask)).value


@dataclass(frozen=True)
class BonusInputs:
    """Log-probabilities that a bonus is a function of.

    Attributes:
        logp: log π, [B], or [B, T] for probability="token".
        ref_logp: log π_ref in the shape of `logp`, for the designs that depend on it.
        num_tokens: response lengths [B], at least 1, for "token_mean".
        mask: booleans [B, T], true on response tokens, for "token".
    """

    logp: Tensor
    ref_logp: Tensor | None = None
    num_tokens: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Bonus:
    """An exploratory bonus with all that defines it; a combination that exists is defined.

    Attributes:
        design: the row of `DESIGNS`.
        divergence: the divergence of the preference loss.
        probability: which probability enters; see the module.
        numerics: "exact", or "paper" for the published code's ε forms.
        beta: β > 0 of the preference loss, where the design depends on it.
    """

    design: Design
    divergence: Divergence
    probability: Probability = "sequence"
    numerics: Numerics = "exact"
    beta: float | None = None

    @classmethod
    def of(
        cls,
        design: str,
        divergence: str | float,
        *,
        probability: Probability = "sequence",
        numerics: Numerics = "exact",
        beta: float | None = None,
    ) -> Self:
        """The bonus of that name.

        Raises:
            ValueError: an unknown name, or a combination that is not defined.
        """
        check_choice("probability", probability, get_args(Probability))
        check_choice("numerics", numerics, get_args(Numerics))
        resolved = resolve_divergence(divergence)
        row = check_design(design, resolved)
        if numerics == "paper":
            check_published(design, resolved)
        if row.needs_beta and (beta is None or not beta > 0.0):
            raise ValueError(
                f"design {design!r} needs beta > 0, the β of the preference loss, got {beta}"
            )
        return cls(row, resolved, probability, numerics, beta)

    def __call__(self, inputs: BonusInputs) -> "BonusValues":
        """Evaluate the bonus of each response.

        Raises:
            ValueError: an input is missing, or shapes or dtypes do not fit.
        """
        terms = self._terms(inputs)
        published = PUBLISHED_BONUSES.get((self.design.name, self.divergence.name))
        if self.numerics == "paper" and published is not None:
            value = published(terms.logp)
        else:
            value = self.design.bonus(terms)
        mask = inputs.mask
        if self.probability == "token" and mask is not None:
            value = torch.where(mask, value, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return BonusValues(self, inputs, terms, value)

    def _terms(self, inputs: BonusInputs) -> Terms:
        """Validate the inputs and bring log-probabilities to the unit that `probability` names."""
        logp, ref_logp = working_precision(inputs.logp, "logp"), inputs.ref_logp
        if ref_logp is None:
            if self.design.needs_ref_logp:
                raise ValueError(
                    f"design {self.design.name!r} needs ref_logp, log π_ref in the shape of logp"
                )
        elif ref_logp.shape != logp.shape:
            raise ValueError(
                f"ref_logp must have the shape of logp {tuple(logp.shape)}, "
                f"got {tuple(ref_logp.shape)}"
            )
        else:
            ref_logp = working_precision(ref_logp, "ref_logp")
            if ref_logp.dtype != logp.dtype:
                raise ValueError(
                    f"ref_logp is {ref_logp.dtype} but logp is {logp.dtype}: cast one of them"
                )
            ref_logp = self._per_unit(ref_logp, inputs)
        return Terms(self._per_unit(logp, inputs), self.divergence, ref_logp, self.beta)

    def _per_unit(self, logp: Tensor, inputs: BonusInputs) -> Tensor:
        """The log π that `probability` means: [B], or [B, T] made harmless off the mask."""
        probability, num_tokens, mask = self.probability, inputs.num_tokens, inputs.mask
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
        return logp / num_tokens


@dataclass(frozen=True)
class BonusValues:
    """A bonus evaluated on a batch of responses.

    Attributes:
        bonus: the bonus.
        inputs: the log-probabilities.
        terms: the same in the unit of `bonus.probability`, elementwise.
        value: L_bonus of each response, [B], attached to `inputs.logp`.
    """

    bonus: Bonus
    inputs: BonusInputs
    terms: Terms
    value: Tensor

    def saturation(self) -> "BonusSaturation":
        """Tell which responses have a clamped bonus or one without gradient.

        `inputs.logp` must have been differentiable. Design "none" has no bonus that could saturate,
        so it reports none.
        """
        bonus, mask = self.bonus, self.inputs.mask
        if bonus.design.name == "none":
            idle = torch.zeros_like(self.value, dtype=torch.bool)
            return BonusSaturation(clamped=idle, underflowed=idle)
        (gradient,) = torch.autograd.grad(self.value.sum(), self.inputs.logp, retain_graph=True)
        without_gradient = gradient == 0.0
        clamped = bonus.design.clamped(self.terms)
        if bonus.probability == "token" and mask is not None:
            without_gradient = (without_gradient | ~mask).all(dim=1)
            clamped = (clamped & mask).any(dim=1)
        if bonus.numerics == "paper":
            clamped = torch.zeros_like(without_gradient)
        return BonusSaturation(clamped=clamped, underflowed=without_gradient & ~clamped)


@dataclass(frozen=True)
class BonusSaturation:
    """Responses whose bonus does not explore.

    Attributes:
        clamped: booleans [B]; the true bonus has no float (for probability="token": at some token).
        underflowed: booleans [B]; not clamped, yet the bonus's gradient is exactly zero.
    """

    clamped: Tensor
    underflowed: Tensor


def undefined_bonus(bonus: Bonus) -> str | None:
    """Values of π without a bonus, and the reason; None where every π has one."""
    if bonus.numerics == "exact":
        return None
    return UNDEFINED.get((bonus.design.name, bonus.divergence.name))
