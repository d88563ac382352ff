"""The f-DPO loss and the implicit reward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import ALL_DIVERGENCES, bonus_of

from stages.objectives.divergences import (
    DIVERGENCES,
    Divergence,
    implicit_reward,
    reward_saturation,
)
from stages.objectives.numerics import expm1
from stages.objectives.objective import preference_loss

DIVERGENCE = pytest.mark.parametrize("divergence", ALL_DIVERGENCES)
LOGRATIOS = st.floats(-5000.0, 5000.0, width=32)


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


@pytest.mark.parametrize(("limit", "name"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_alpha_limits_are_continuous(limit, name):
    logratio = torch.linspace(-20.0, 20.0, 81, dtype=torch.float64)
    at_limit = implicit_reward(logratio, divergence=name)
    for distance in (1e-6, 1e-9, 1e-12):
        near = implicit_reward(logratio, divergence=abs(limit - distance))
        torch.testing.assert_close(near, at_limit, rtol=100 * max(distance, 1e-13), atol=0)


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


def test_a_divergence_outside_the_family_is_one_row(monkeypatch):
    # Pearson's χ²: f(u) = (u − 1)², f′(u) = 2 (u − 1), u f′(u) − f(u) = u² − 1.
    row = Divergence("chi2", lambda log_u: 2 * expm1(log_u), lambda log_u: expm1(2 * log_u))
    monkeypatch.setitem(DIVERGENCES, row.name, row)
    logratio = torch.tensor([0.0, 2.0]).log1p()
    assert implicit_reward(logratio, divergence="chi2").tolist() == pytest.approx([0.0, 4.0])
    loss = preference_loss(logratio[1:], logratio[:1], beta=0.25, divergence="chi2")
    assert loss.exp().item() == pytest.approx(1 + torch.tensor(-1.0).exp().item())
    half = torch.tensor([0.5]).log()
    bonus = bonus_of(half, "inverse_pi", "chi2")
    assert bonus.item() == pytest.approx(3.0)
    with pytest.raises(ValueError, match="is not defined under chi2: its u contains α"):
        bonus_of(half, "arctanh", "chi2")
