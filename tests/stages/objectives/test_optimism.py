"""The optimism condition (Definition 3.1, Theorem 4.2, Lemma 3.1) by autodiff.

The paper asks of a bonus that ∂²L_bonus/∂π∂π_s < 0: where the sampling policy rarely goes, raising
π should pay more. L_bonus is an expectation over π_s = π_ref, so a single response contributes
π_ref · b(π, π_ref), b being what `exploratory_bonus` returns; the condition is on that product.

Shapes: `N` points (π, π_ref) of a grid; `Y` responses to one prompt.
"""

import itertools

import pytest
import torch
from objective_cases import bonus_of

from stages.objectives.divergences import DIVERGENCES


def mixed_derivative(pi, pi_ref, *, design, divergence):
    """∂²(π_ref · b(π, π_ref)) / ∂π ∂π_ref at each point, by automatic differentiation.

    Probabilities in (0, 1) and derivatives are [N]; these are negative where it is optimistic.
    """
    pi = pi.detach().requires_grad_()
    pi_ref = pi_ref.detach().requires_grad_()
    with torch.enable_grad():
        bonus = bonus_of(pi.log(), design, divergence, pi_ref.log())
        (by_pi,) = torch.autograd.grad((pi_ref * bonus).sum(), pi, create_graph=True)
        (mixed,) = torch.autograd.grad(by_pi.sum(), pi_ref)
    return mixed.detach()


def probability_grid(num_points=40, *, smallest=1e-6):
    """All pairs (π, π_ref) of `num_points` probabilities even in log-odds: two [N] tensors."""
    edge = torch.logit(torch.tensor(smallest, dtype=torch.float64)).item()
    one_axis = torch.sigmoid(torch.linspace(edge, -edge, num_points, dtype=torch.float64))
    pi, pi_ref = torch.meshgrid(one_axis, one_axis, indexing="ij")
    return pi.reshape(-1), pi_ref.reshape(-1)


def expected_bonus(policy_logits, ref_probs, *, design, divergence):
    """E_{y ~ π_ref} b(π, π_ref) over all responses to one prompt, a scalar."""
    bonus = bonus_of(policy_logits.log_softmax(dim=0), design, divergence, ref_probs.log())
    return (ref_probs * bonus).sum()


ALPHAS = ["reverse_kl", "hellinger", "forward_kl", 0.1, 0.9]
PI, PI_REF = probability_grid()


def responses(seed, count=7):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, generator=generator, dtype=torch.float64)
    ref_probs = torch.randn(count, generator=generator, dtype=torch.float64).softmax(dim=0)
    return logits, ref_probs


@pytest.mark.parametrize(
    ("design", "divergence"),
    [
        *itertools.product(("one_minus_pi", "inverse_pi", "arctanh"), ALPHAS),
        ("inverse_pi", "js"),
        # Section 4: their practical forms are cases of GEB, though their derivations fail.
        *itertools.product(("selm", "xpo", "vpo", "se_popo"), ["reverse_kl"]),
    ],
)
def test_geb_is_optimistic(design, divergence):
    """Theorem 4.2."""
    mixed = mixed_derivative(PI, PI_REF, design=design, divergence=divergence)
    assert (mixed < 0).all()


@pytest.mark.parametrize("divergence", [*DIVERGENCES, 0.1, 0.9])
def test_feb_is_not(divergence):
    """Lemma 3.2: never negative; by its proof (1−α)(π_ref/π)^{−α}/π, zero under reverse KL."""
    mixed = mixed_derivative(PI, PI_REF, design="feb", divergence=divergence)
    if divergence == "reverse_kl":
        # π_ref·(π/π_ref) is linear in π; autodiff leaves rounding of two terms of size 1/π_ref.
        assert (mixed.abs() * PI_REF < 1e-12).all()
    else:
        assert (mixed > 0).all()


def test_feb_mixed_derivative_is_the_one_in_the_proof():
    for alpha in (0.0, 0.25, 0.5):
        mixed = mixed_derivative(PI, PI_REF, design="feb", divergence=alpha)
        # ∂/∂π_ref of (π_ref/π)^{1−α}
        expected = (1 - alpha) * (PI_REF / PI) ** (-alpha) / PI
        torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("seed", range(3))
def test_feb_under_reverse_kl_does_not_move_the_optimum(seed):
    """Lemma 3.1: E_{π_ref}(π/π_ref − 1) is zero whatever the policy, so it has no gradient."""
    logits, ref_probs = responses(seed)
    leaf = logits.requires_grad_()
    bonus = expected_bonus(leaf, ref_probs, design="feb", divergence="reverse_kl")
    (gradient,) = torch.autograd.grad(bonus, leaf)
    assert abs(bonus.item()) < 1e-14
    assert gradient.abs().max() < 1e-14


@pytest.mark.parametrize("divergence", ["hellinger", "forward_kl", "js", 0.3])
@pytest.mark.parametrize("seed", range(2))
def test_feb_elsewhere_pulls_the_policy_onto_the_reference(divergence, seed):
    """Theorem 3.3: its maximum is at π = π_ref, as gradient ascent finds."""
    logits, ref_probs = responses(seed)
    leaf = logits.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([leaf], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        loss = -expected_bonus(leaf, ref_probs, design="feb", divergence=divergence)
        loss.backward()
        return loss

    optimiser.step(closure)
    torch.testing.assert_close(leaf.detach().softmax(dim=0), ref_probs, rtol=1e-3, atol=1e-4)
