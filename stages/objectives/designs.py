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
    """Arguments of a bonus. All tensors share one shape and dtype."""

    logp: Tensor
    divergence: Divergence
    """The divergence of the preference loss."""
    ref_logp: Tensor
    beta: float
    """β of the preference loss."""

    @property
    def logratio(self) -> Tensor:
        """The difference log π − log π_ref."""
        return self.logp - self.ref_logp

    @property
    def alpha(self) -> float:
        """α, known to exist."""
        assert self.divergence.alpha is not None, "`undefined` refuses it"
        return self.divergence.alpha


@dataclass(frozen=True)
class Design:
    """One exploratory bonus."""

    name: str
    """The name under which it is configured."""
    bonus: Callable[[Terms], Tensor]
    """Terms → bonus, elementwise."""
    clamped: Callable[[Terms], Tensor]
    """Terms → booleans, where the true bonus has no float."""


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


def _geb(name: str, log_u: Callable[[Terms], Tensor]) -> Design:
    """The bonus u f′(u) − f(u) (Eq. 11) of one design of u."""

    def clamped(terms: Terms) -> Tensor:
        """Mask of the places where that bonus overflows, or where u is zero."""
        log_of_u = log_u(terms)
        smallest = torch.full_like(log_of_u, torch.finfo(log_of_u.dtype).tiny).log()
        return terms.divergence.gain_saturates(log_of_u) | (log_of_u <= smallest)

    return Design(name, lambda terms: terms.divergence.conjugate_gain(log_u(terms)), clamped)


def _se_popo(terms: Terms) -> Tensor:
    return -centered_sigmoid(terms.beta * terms.logratio) / terms.beta


DESIGNS: dict[str, Design] = {
    row.name: row
    for row in (
        Design("none", _zero, _never),
        _geb("one_minus_pi", log_u_one_minus_pi),
        _geb("inverse_pi", log_u_inverse_pi),
        _geb("arctanh", log_u_arctanh),
        Design(
            "feb",
            lambda terms: terms.divergence.conjugate_gain(terms.logratio),
            lambda terms: terms.divergence.gain_saturates(terms.logratio),
        ),
        Design("selm", lambda terms: -terms.beta * terms.logratio, _never),
        Design("xpo", lambda terms: -terms.logp, _never),
        Design("vpo", lambda terms: -terms.logratio, _never),
        Design("se_popo", _se_popo, _never),
    )
}
"""Every exploratory bonus by name; docs/equations.md has their equations."""


# The bonuses as the paper's published code computes them (numerics = "paper"). They exponentiate
# log π first and guard with ε = 1e-5, so in float32 most of them have no gradient left for long
# responses (docs/equations.md). They exist for GEB's three designs under the paper's three
# divergences; the Hellinger forms are √u where the exact ones are 2√u − 2, and constants are
# dropped as in the paper's Table 2. Baselines have no ε in their authors' code.

EPSILON = 1e-5
"""Guard of the published code inside 1/(π + ε) and arctanh(1 − π − ε)."""


def _arctanh(logp: Tensor) -> Tensor:
    return torch.arctanh(1.0 - logp.exp() - EPSILON)


PUBLISHED_BONUSES: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("one_minus_pi", "reverse_kl"): lambda logp: -logp.exp(),
    ("one_minus_pi", "hellinger"): lambda logp: (1.5 - logp.exp()).sqrt(),
    ("one_minus_pi", "forward_kl"): lambda logp: (1.0 - logp.exp()).log(),
    ("inverse_pi", "reverse_kl"): lambda logp: 1.0 / (logp.exp() + EPSILON),
    ("inverse_pi", "hellinger"): lambda logp: 1.0 / ((0.5 * logp).exp() + EPSILON),
    ("inverse_pi", "forward_kl"): lambda logp: -logp,
    ("arctanh", "reverse_kl"): lambda logp: _arctanh(logp),
    ("arctanh", "hellinger"): lambda logp: (_arctanh(logp) + 0.5).sqrt(),
    ("arctanh", "forward_kl"): lambda logp: _arctanh(logp).log(),
}
"""(design, divergence) → bonus of log π, elementwise."""
