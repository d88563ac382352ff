"""The optimism condition as something that runs (Definition 3.1, Theorem 4.2, Lemmas 3.1 and 4.1).

The paper asks of a bonus that ∂²L_bonus/∂π∂π_s < 0: where the sampling policy rarely goes, raising
π should pay more. L_bonus is an expectation over π_s = π_ref, so a single response contributes
π_ref · b(π, π_ref), b being what `exploratory_bonus` returns; the condition is on that product.

Shapes: `N` points (π, π_ref) of a grid; `Y` responses to one prompt.
"""

import torch
from torch import Tensor

from stages.objectives.bonuses import exploratory_bonus
from stages.objectives.divergences import resolve_divergence


def mixed_derivative(
    pi: Tensor, pi_ref: Tensor, *, design: str, divergence: str | float, beta: float = 0.1
) -> Tensor:
    """∂²(π_ref · b(π, π_ref)) / ∂π ∂π_ref at each point, by automatic differentiation.

    Args:
        pi: probabilities in (0, 1), [N]; float64 is advised.
        pi_ref: the same of the reference, [N].
        design: the bonus.
        divergence: its divergence.
        beta: β, for the designs that depend on it.

    Returns:
        Mixed derivatives [N]: negative where the bonus is optimistic.
    """
    pi = pi.detach().requires_grad_()
    pi_ref = pi_ref.detach().requires_grad_()
    with torch.enable_grad():
        bonus = exploratory_bonus(
            pi.log(), design=design, divergence=divergence, ref_logp=pi_ref.log(), beta=beta
        )
        (by_pi,) = torch.autograd.grad((pi_ref * bonus).sum(), pi, create_graph=True)
        (mixed,) = torch.autograd.grad(by_pi.sum(), pi_ref)
    return mixed.detach()


def probability_grid(num_points: int = 40, *, smallest: float = 1e-6) -> tuple[Tensor, Tensor]:
    """All pairs (π, π_ref) of `num_points` probabilities even in log-odds: two [N] tensors."""
    edge = torch.logit(torch.tensor(smallest, dtype=torch.float64)).item()
    one_axis = torch.sigmoid(torch.linspace(edge, -edge, num_points, dtype=torch.float64))
    pi, pi_ref = torch.meshgrid(one_axis, one_axis, indexing="ij")
    return pi.reshape(-1), pi_ref.reshape(-1)


def expected_bonus(
    policy_logits: Tensor,
    ref_probs: Tensor,
    *,
    design: str,
    divergence: str | float,
    beta: float = 0.1,
) -> Tensor:
    """E_{y ~ π_ref} b(π, π_ref) over all responses to one prompt, a scalar.

    Args:
        policy_logits: logits of π, [Y].
        ref_probs: π_ref, [Y], positive.
        design: the bonus.
        divergence: its divergence.
        beta: β, for the designs that depend on it.
    """
    bonus = exploratory_bonus(
        policy_logits.log_softmax(dim=0),
        design=design,
        divergence=divergence,
        ref_logp=ref_probs.log(),
        beta=beta,
    )
    return (ref_probs * bonus).sum()


def normalisation_ratio(u: Tensor, ref_probs: Tensor, *, divergence: str | float) -> Tensor:
    """Ratio Λ of Lemma 4.1: [f′(u) + u f″(u) − f′(u/Z)] / [Z u f″(u)], Z = E u under π_ref.

    The lemma needs it positive and equal for all responses; then the objective normalised by Z,
    held fixed, and the one without it have proportional gradients.

    Args:
        u: u of each response, [Y], positive.
        ref_probs: π_ref, [Y].
        divergence: the divergence f.

    Returns:
        Λ [Y].
    """
    derivative = resolve_divergence(divergence).derivative
    log_u = u.detach().log().requires_grad_()
    normalisation = (ref_probs * u.detach()).sum()
    with torch.enable_grad():
        f_prime = derivative(log_u)
        # d f′(u)/d log u = u f″(u)
        (curvature,) = torch.autograd.grad(f_prime.sum(), log_u)
    scaled = derivative(log_u.detach() - normalisation.log())
    return (f_prime.detach() + curvature - scaled) / (normalisation * curvature)
