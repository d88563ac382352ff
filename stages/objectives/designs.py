"""The registry of exploratory bonuses: GEB's designs of u and the baselines, each as one row.

A bonus is a function of one log-probability, of a whole response or of a single token, as
`probability` says; the functions here are elementwise and know nothing of that choice. Bonuses are
what the loss *subtracts*.

CONTRIBUTING.md has the places of a new design.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.objectives.divergences import Divergence
from stages.objectives.numerics import LOG_2, centered_sigmoid, one_minus_exp


@dataclass(frozen=True)
class Terms:
    """Arguments of a bonus. All tensors share one shape and dtype.

    Attributes:
        logp: log π.
        ref_logp: log π_ref, where the design needs it.
        beta: β, where the design needs it.
        divergence: the divergence of the preference loss.
    """

    logp: Tensor
    divergence: Divergence
    ref_logp: Tensor | None = None
    beta: float | None = None

    @property
    def logratio(self) -> Tensor:
        """The difference log π − log π_ref."""
        assert self.ref_logp is not None, "checked by Bonus"
        return self.logp - self.ref_logp

    @property
    def temperature(self) -> float:
        """β, known to be set."""
        assert self.beta is not None, "checked by Bonus"
        return self.beta

    @property
    def alpha(self) -> float:
        """α, known to exist."""
        assert self.divergence.alpha is not None, "checked by Bonus"
        return self.divergence.alpha


@dataclass(frozen=True)
class Design:
    """One exploratory bonus.

    Attributes:
        name: the name under which it is configured.
        equation: the bonus, as documentation.
        bonus: Terms → bonus, elementwise.
        clamped: Terms → booleans, where the true bonus has no float.
        needs_ref_logp: whether it depends on log π_ref.
        needs_beta: whether it depends on β.
        refuses: Divergence → why the bonus is not defined under it, or None where it is.
    """

    name: str
    equation: str
    bonus: Callable[[Terms], Tensor]
    clamped: Callable[[Terms], Tensor]
    needs_ref_logp: bool = False
    needs_beta: bool = False
    refuses: Callable[[Divergence], str | None] = lambda divergence: None


def log_u_one_minus_pi(terms: Terms) -> Tensor:
    """log(1 + α − π), accurate as π → 0 and as π → 1.

    At α = 0 and π = 1 its argument is zero; it is held at the smallest normal float, constant.
    """
    likely, log_likely, log_unlikely = _split_at_half(terms.logp)
    return torch.where(
        likely,
        _log_alpha_plus(one_minus_exp(log_likely), terms.alpha),
        torch.log1p(terms.alpha - torch.exp(log_unlikely)),
    )


def log_u_inverse_pi(terms: Terms) -> Tensor:
    """log(1/π), whatever α."""
    return -terms.logp


def log_u_arctanh(terms: Terms) -> Tensor:
    """log(arctanh(1−π) + α), with arctanh(1−π) = ½(log(2−π) − log π): a sum of two positives."""
    likely, log_likely, log_unlikely = _split_at_half(terms.logp)
    one_minus_pi = torch.where(likely, one_minus_exp(log_likely), 1.0 - torch.exp(log_unlikely))
    return _log_alpha_plus((torch.log1p(one_minus_pi) - terms.logp) / 2.0, terms.alpha)


def _split_at_half(logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(π > ½, log π there and ½ elsewhere, log π elsewhere and ½ there).

    1 − π keeps its digits as −expm1(log π) where π is large, its gradient as 1 − exp where small.
    """
    likely = logp > -LOG_2
    return likely, torch.where(likely, logp, -LOG_2), torch.where(likely, -LOG_2, logp)


def _log_alpha_plus(x: Tensor, alpha: float) -> Tensor:
    """log(α + x) for x ≥ 0, accurate where the sum nears one (α near one, small x) or zero."""
    if alpha >= 0.5:
        return torch.log1p((alpha - 1.0) + x)
    return torch.log((alpha + x).clamp(min=torch.finfo(x.dtype).tiny))


def _zero(terms: Terms) -> Tensor:
    """Zero that stays attached to log π, so that callers may differentiate any bonus."""
    return 0.0 * terms.logp


def _never(terms: Terms) -> Tensor:
    return torch.zeros_like(terms.logp, dtype=torch.bool)


def _gain_of(log_u: Callable[[Terms], Tensor]) -> Callable[[Terms], Tensor]:
    """The bonus u f′(u) − f(u) (Eq. 11) of one design of u."""
    return lambda terms: terms.divergence.conjugate_gain(log_u(terms))


def _gain_clamped(log_u: Callable[[Terms], Tensor]) -> Callable[[Terms], Tensor]:
    """Mask of the places where that bonus overflows, or where u is zero."""

    def clamped(terms: Terms) -> Tensor:
        log_of_u = log_u(terms)
        smallest = torch.full_like(log_of_u, torch.finfo(log_of_u.dtype).tiny).log()
        return terms.divergence.gain_saturates(log_of_u) | (log_of_u <= smallest)

    return clamped


def _log_ratio(terms: Terms) -> Tensor:
    return terms.logratio


def _selm(terms: Terms) -> Tensor:
    return -terms.temperature * terms.logratio


def _xpo(terms: Terms) -> Tensor:
    return -terms.logp


def _vpo(terms: Terms) -> Tensor:
    return -terms.logratio


def _se_popo(terms: Terms) -> Tensor:
    return -centered_sigmoid(terms.temperature * terms.logratio) / terms.temperature


def _needs_alpha(divergence: Divergence) -> str | None:
    """GEB's u contains α, which only an α-divergence has."""
    if divergence.alpha is None:
        return f"its u contains α, and {divergence.name} is not an α-divergence"
    return None


def _reverse_kl_only(divergence: Divergence) -> str | None:
    """Baselines whose derivation uses that under reverse KL the reward is β times the logratio."""
    if divergence.name != "reverse_kl":
        return (
            "it is derived from r = β log(π/π_ref), which holds under reverse_kl only "
            "(paper, Appendix A.3)"
        )
    return None


DESIGNS: dict[str, Design] = {
    row.name: row
    for row in (
        Design("none", "0", _zero, _never),
        Design(
            "one_minus_pi",
            "(u^α − 1)/α, u = 1 + α − π",
            _gain_of(log_u_one_minus_pi),
            _gain_clamped(log_u_one_minus_pi),
            refuses=_needs_alpha,
        ),
        Design(
            "inverse_pi",
            "(u^α − 1)/α, u = 1/π",
            _gain_of(log_u_inverse_pi),
            _gain_clamped(log_u_inverse_pi),
        ),
        Design(
            "arctanh",
            "(u^α − 1)/α, u = arctanh(1 − π) + α",
            _gain_of(log_u_arctanh),
            _gain_clamped(log_u_arctanh),
            refuses=_needs_alpha,
        ),
        Design(
            "feb",
            "(r^α − 1)/α, r = π/π_ref",
            _gain_of(_log_ratio),
            lambda terms: terms.divergence.gain_saturates(terms.logratio),
            needs_ref_logp=True,
        ),
        Design(
            "selm",
            "−β (log π − log π_ref)",
            _selm,
            _never,
            needs_ref_logp=True,
            needs_beta=True,
            refuses=_reverse_kl_only,
        ),
        Design("xpo", "−log π", _xpo, _never, refuses=_reverse_kl_only),
        Design(
            "vpo",
            "−(log π − log π_ref)",
            _vpo,
            _never,
            needs_ref_logp=True,
            refuses=_reverse_kl_only,
        ),
        Design(
            "se_popo",
            "−(σ(β (log π − log π_ref)) − ½)/β",
            _se_popo,
            _never,
            needs_ref_logp=True,
            needs_beta=True,
            refuses=_reverse_kl_only,
        ),
    )
}
"""Every exploratory bonus by name."""


def check_design(design: str, divergence: Divergence) -> Design:
    """Return the design called `design`, known to be defined under `divergence`.

    Raises:
        ValueError: no design has that name, or the theory does not define it under that divergence.
    """
    if design not in DESIGNS:
        raise ValueError(f"design {design!r} is unknown: choose one of {', '.join(DESIGNS)}")
    reason = DESIGNS[design].refuses(divergence)
    if reason is not None:
        raise ValueError(f"design {design!r} is not defined under {divergence.name}: {reason}")
    return DESIGNS[design]
