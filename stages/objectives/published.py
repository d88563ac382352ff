"""The bonuses as the paper's published code computes them, for reproduction (numerics = "paper").

They exponentiate log π first and guard with ε = 1e-5, so in float32 most of them have no gradient
left for long responses (docs/equations.md has the table). They exist for GEB's three designs under
the three divergences of the paper; the Hellinger forms are √u where the exact ones are 2√u − 2, and
constants are dropped as in the paper's Table 2. Baselines have no ε in their authors' code, so for
them `paper` and `exact` are the same.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stages.objectives.divergences import Divergence

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

UNDEFINED: dict[tuple[str, str], str] = {
    ("arctanh", "forward_kl"): "π > 1 − 1e-5: log(arctanh(1 − π − 1e-5)) is not a number",
    ("one_minus_pi", "forward_kl"): "π = 1: log(1 − π) is not finite",
}
"""Published forms that have no value for some responses: for which, and why."""

GEB_DESIGNS = frozenset(design for design, _ in PUBLISHED_BONUSES)


def check_published(design: str, divergence: Divergence) -> None:
    """Raise ValueError where the published code has no form for a GEB design."""
    if design in GEB_DESIGNS and (design, divergence.name) not in PUBLISHED_BONUSES:
        raise ValueError(
            f"numerics='paper' has no form of {design!r} under {divergence.name}: the published "
            "code covers reverse_kl, hellinger and forward_kl. Use numerics='exact'"
        )
