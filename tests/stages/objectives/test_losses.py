"""The f-DPO loss and the implicit reward."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import ALL_DIVERGENCES

from stages.objectives import (
    DIVERGENCES,
    exploratory_bonus,
    implicit_reward,
    preference_loss,
    reward_saturation,
)
from stages.objectives.divergences import Divergence
from stages.objectives.numerics import expm1

DIVERGENCE = pytest.mark.parametrize("divergence", ALL_DIVERGENCES)
LOGRATIOS = st.floats(-5000.0, 5000.0, width=32)
MODERATE = st.floats(-20.0, 20.0)


@DIVERGENCE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(chosen=LOGRATIOS, rejected=LOGRATIOS, beta=st.sampled_from([1e-3, 0.1, 10.0, 1000.0]))
@settings(max_examples=25, deadline=None)
def test_finite_loss_and_gradient_everywhere(divergence, dtype, chosen, rejected, beta):
    pair = [torch.tensor([x], dtype=dtype, requires_grad=True) for x in (chosen, rejected)]
    loss = preference_loss(*pair, beta=beta, divergence=divergence, label_smoothing=0.1)
    assert loss.isfinite().all()
    for gradient in torch.autograd.grad(loss.sum(), pair):
        # An fp16 leaf rounds its own gradient to fp16, where anything above 65504 is infinite.
        assert gradient.isfinite().all() or dtype == torch.float16


@DIVERGENCE
@given(chosen=MODERATE, rejected=MODERATE)
@settings(max_examples=25, deadline=None)
def test_swapping_a_pair_flips_the_margin(divergence, chosen, rejected):
    a, b = (torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected))
    margin = implicit_reward(a, divergence=divergence) - implicit_reward(b, divergence=divergence)
    forward = preference_loss(a, b, beta=0.1, divergence=divergence)
    backward = preference_loss(b, a, beta=0.1, divergence=divergence)
    # −log σ(z) + log σ(−z) = −z
    torch.testing.assert_close(forward - backward, -0.1 * margin, rtol=1e-9, atol=1e-9)


@given(chosen=MODERATE, rejected=MODERATE, shift=MODERATE)
@settings(max_examples=25, deadline=None)
def test_reverse_kl_loss_does_not_see_a_shift_of_both_logratios(chosen, rejected, shift):
    a, b = (torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected))
    torch.testing.assert_close(
        preference_loss(a + shift, b + shift, beta=0.3, divergence="reverse_kl"),
        preference_loss(a, b, beta=0.3, divergence="reverse_kl"),
    )


@given(chosen=MODERATE, rejected=MODERATE)
@settings(max_examples=25, deadline=None)
def test_reverse_kl_is_closed_form_dpo(chosen, rejected):
    a, b = (torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected))
    closed_form = torch.log1p(torch.exp(-0.1 * (a - b)))
    torch.testing.assert_close(
        preference_loss(a, b, beta=0.1, divergence="reverse_kl"), closed_form
    )


@DIVERGENCE
def test_gradcheck(divergence):
    pair = [
        torch.tensor(x, dtype=torch.float64, requires_grad=True)
        for x in ([0.0, 1.0, -3.0, 0.5], [0.0, -2.0, 0.3, 0.5])
    ]
    assert torch.autograd.gradcheck(
        lambda a, b: preference_loss(a, b, beta=0.2, divergence=divergence, label_smoothing=0.2),
        pair,
    )


@DIVERGENCE
def test_reward_is_zero_with_slope_f_second_of_one_where_policies_agree(divergence):
    logratio = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    reward = implicit_reward(logratio, divergence=divergence)
    (slope,) = torch.autograd.grad(reward.sum(), logratio)
    assert reward.item() == 0.0
    # f″(1) = 1 for every α-divergence; ½ for Jensen–Shannon
    assert slope.item() == (0.5 if divergence == "js" else 1.0)


@pytest.mark.parametrize(("limit", "name"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_alpha_limits_are_continuous(limit, name):
    logratio = torch.linspace(-20.0, 20.0, 81, dtype=torch.float64)
    at_limit = implicit_reward(logratio, divergence=name)
    for distance in (1e-6, 1e-9, 1e-12):
        near = implicit_reward(logratio, divergence=abs(limit - distance))
        torch.testing.assert_close(near, at_limit, rtol=100 * max(distance, 1e-13), atol=0)


def test_forward_kl_gradient_at_equal_logratios_of_minus_ten():
    """22026·β/2: 1101 at β = 0.1 where reverse KL has 0.05."""
    for divergence, expected in (("forward_kl", 1101.3), ("reverse_kl", 0.05)):
        chosen = torch.tensor([-10.0], requires_grad=True)
        loss = preference_loss(chosen, torch.tensor([-10.0]), beta=0.1, divergence=divergence)
        (gradient,) = torch.autograd.grad(loss.sum(), chosen)
        assert gradient.item() == pytest.approx(-expected, rel=1e-3)


@pytest.mark.parametrize(
    ("divergence", "alpha"), [("forward_kl", 0), ("hellinger", 0.5), (0.25,) * 2]
)
def test_reward_is_clamped_where_trl_clamps(divergence, alpha):
    exponents = torch.tensor([-79.9, -80.1, -5000.0])
    logratio = (exponents / (1 - alpha)).requires_grad_()
    assert reward_saturation(logratio, divergence=divergence).tolist() == [False, True, True]
    reward = implicit_reward(logratio, divergence=divergence)
    (gradient,) = torch.autograd.grad(reward.sum(), logratio)
    assert reward[1] == reward[2]
    assert gradient[1:].tolist() == [0.0, 0.0]
    assert gradient[0] > 0
    assert not reward_saturation(logratio, divergence="reverse_kl").any()
    assert not reward_saturation(logratio, divergence="js").any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.0}, "beta must be positive"),
        ({"beta": float("nan")}, "beta must be positive"),
        ({"label_smoothing": 0.6}, r"label_smoothing must be in \[0, 0.5\]"),
        ({"divergence": "kl"}, "divergence 'kl' is unknown"),
        (
            {"rejected_logratio": torch.zeros(2)},
            r"^chosen and rejected logratios must have one shape and dtype, got "
            r"\(1,\) torch\.float32 and \(2,\) torch\.float32$",
        ),
        ({"rejected_logratio": torch.zeros(1).double()}, "one shape and dtype"),
    ],
)
def test_refusals(change, message):
    arguments = {
        "chosen_logratio": torch.zeros(1),
        "rejected_logratio": torch.zeros(1),
        "beta": 0.1,
        "divergence": "reverse_kl",
    }
    with pytest.raises(ValueError, match=message):
        preference_loss(**(arguments | change))


@pytest.mark.parametrize("function", [implicit_reward, reward_saturation])
def test_log_ratios_that_are_no_floats_are_named(function):
    with pytest.raises(ValueError, match=r"^logratio "):
        function(torch.tensor([1]), divergence="reverse_kl")


def test_a_label_that_says_nothing_leaves_no_preference():
    """At ε = ½ the loss is symmetric: least, log 2, at margin zero."""
    margins = torch.tensor([-3.0, 0.0, 3.0])
    loss = preference_loss(
        margins, torch.zeros(3), beta=1.0, divergence="reverse_kl", label_smoothing=0.5
    )
    assert loss[0] == loss[2] > loss[1]
    assert loss[1].item() == pytest.approx(math.log(2))


def test_a_divergence_outside_the_family_is_one_row(monkeypatch):
    # Pearson's χ²: f(u) = (u − 1)², f′(u) = 2 (u − 1), u f′(u) − f(u) = u² − 1.
    row = Divergence("chi2", lambda log_u: 2 * expm1(log_u), lambda log_u: expm1(2 * log_u))
    monkeypatch.setitem(DIVERGENCES, row.name, row)
    logratio = torch.tensor([0.0, 2.0]).log1p()
    assert implicit_reward(logratio, divergence="chi2").tolist() == pytest.approx([0.0, 4.0])
    loss = preference_loss(logratio[1:], logratio[:1], beta=0.25, divergence="chi2")
    assert loss.exp().item() == pytest.approx(1 + torch.tensor(-1.0).exp().item())
    half = torch.tensor([0.5]).log()
    bonus = exploratory_bonus(half, design="inverse_pi", divergence="chi2")
    assert bonus.item() == pytest.approx(3.0)
    with pytest.raises(ValueError, match="is not defined under chi2: its u contains α"):
        exploratory_bonus(half, design="arctanh", divergence="chi2")
