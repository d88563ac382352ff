"""Theorems of the paper on the bonuses, checked by automatic differentiation."""

import math

import pytest
import torch
from optimism import expected_bonus, mixed_derivative, normalisation_ratio, probability_grid

from stages.objectives import DIVERGENCES

ALPHAS = ["reverse_kl", "hellinger", "forward_kl", 0.1, 0.9]
PI, PI_REF = probability_grid()


def responses(seed, count=7):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, generator=generator, dtype=torch.float64)
    ref_probs = torch.randn(count, generator=generator, dtype=torch.float64).softmax(dim=0)
    return logits, ref_probs


def test_the_grid_holds_all_pairs_of_probabilities_even_in_log_odds():
    pi, pi_ref = probability_grid(3, smallest=0.1)
    assert pi.dtype == pi_ref.dtype == torch.float64
    axis = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(pi, axis.repeat_interleave(3))
    torch.testing.assert_close(pi_ref, axis.repeat(3))
    pi, _ = probability_grid()
    assert len(pi) == 1600
    assert pi.min().item() == pytest.approx(1e-6, rel=1e-12, abs=0.0)
    assert pi.max().item() == pytest.approx(1 - 1e-6, rel=1e-15)


@pytest.mark.parametrize("design", ["one_minus_pi", "inverse_pi", "arctanh"])
@pytest.mark.parametrize("divergence", ALPHAS)
def test_geb_is_optimistic(design, divergence):
    """Theorem 4.2."""
    mixed = mixed_derivative(PI, PI_REF, design=design, divergence=divergence)
    assert (mixed < 0).all()


def test_inverse_pi_is_optimistic_under_js_too():
    assert (mixed_derivative(PI, PI_REF, design="inverse_pi", divergence="js") < 0).all()


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


@pytest.mark.parametrize("design", ["selm", "xpo", "vpo", "se_popo"])
def test_baselines_as_implemented_are_optimistic(design):
    """Section 4: their practical forms are cases of GEB, though their derivations fail."""
    assert (mixed_derivative(PI, PI_REF, design=design, divergence="reverse_kl") < 0).all()


def test_no_bonus_has_no_mixed_derivative():
    assert (mixed_derivative(PI, PI_REF, design="none", divergence="reverse_kl") == 0).all()


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


@pytest.mark.parametrize("divergence", ALPHAS)
@pytest.mark.parametrize("seed", range(3))
def test_normalisation_does_not_matter_where_lemma_4_1_says_so(divergence, seed):
    alpha = DIVERGENCES[divergence].alpha if isinstance(divergence, str) else divergence
    logits, ref_probs = responses(seed)
    u = 1.0 + alpha - logits.softmax(dim=0)
    ratio = normalisation_ratio(u, ref_probs, divergence=divergence)
    normalisation = (ref_probs * u).sum().item()
    expected = (
        (1.0 + math.log(normalisation)) / normalisation
        if alpha == 1.0
        else (normalisation ** (1 - alpha) - alpha) / (normalisation * (1 - alpha))
    )
    assert (ratio > 0).all()
    torch.testing.assert_close(ratio, torch.full_like(ratio, expected))


def test_lemma_4_1_does_not_hold_for_js():
    """Jensen–Shannon is outside Theorem 4.2 for this reason, though inverse_pi is defined there."""
    logits, ref_probs = responses(0)
    ratio = normalisation_ratio(1.0 / logits.softmax(dim=0), ref_probs, divergence="js")
    assert ratio.max() / ratio.min() > 1.5


def test_lemma_4_1_holds_only_with_the_normalisation_held_fixed():
    """Its proof does not differentiate Z; if one does, the two gradients are no longer parallel."""

    def gradient(of):
        logits, ref_probs = responses(1)
        leaf = logits.requires_grad_()
        u = 1.0 / leaf.softmax(dim=0)
        (slope,) = torch.autograd.grad((ref_probs * of(u, (ref_probs * u).sum())).sum(), leaf)
        return slope

    def f(u):
        return -4.0 * (u.sqrt() - 0.5 * u - 0.5)

    def f_prime(u):
        return 2.0 - 2.0 / u.sqrt()

    without = gradient(lambda u, z: u * f_prime(u) - f(u))
    fixed = gradient(lambda u, z: u / z.detach() * f_prime(u) - f(u / z.detach()))
    moving = gradient(lambda u, z: u / z * f_prime(u) - f(u / z))
    assert torch.cosine_similarity(without, fixed, dim=0) == pytest.approx(1.0, abs=1e-12)
    assert torch.cosine_similarity(without, moving, dim=0) < 0.999


def test_the_expected_bonus_depends_on_beta_where_the_design_does():
    logits, ref_probs = responses(0)
    given = {"design": "selm", "divergence": "reverse_kl"}
    small = expected_bonus(logits, ref_probs, **given, beta=0.1)
    torch.testing.assert_close(expected_bonus(logits, ref_probs, **given), small)
    torch.testing.assert_close(expected_bonus(logits, ref_probs, **given, beta=0.2), 2 * small)
