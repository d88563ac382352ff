"""The f-DPO loss and the implicit reward."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import ALL_DIVERGENCES

from stages.objectives.divergences import (
    implicit_reward,
    reward_saturation,
)
from stages.objectives.losses import LOSSES
from stages.objectives.objective import ResponseLogps, geb_objective, preference_loss
from stages.objectives.params import ObjectiveParams

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


def independent_losses(z, beta):
    """The equations in probabilities, by numpy."""
    return {"sigmoid": np.log(1 + np.exp(-z)), "ipo": (z / beta - 1 / (2 * beta)) ** 2}


@pytest.mark.parametrize("name", LOSSES)
def test_label_smoothing_takes_some_labels_to_be_wrong(name):
    chosen, rejected = np.array([[0.5, -3.0, 8.0, 25.0, -6.0], [-0.5, 2.0, -4.0, 30.0, -6.5]])
    beta, smoothing = 0.125, 0.25
    margin = beta * (chosen - rejected)
    right, wrong = (independent_losses(z, beta)[name] for z in (margin, -margin))

    sides = [
        ResponseLogps(
            torch.tensor(logp)[:, None],
            torch.zeros(5, 1, dtype=torch.float64),
            torch.ones(5, 1, dtype=torch.bool),
        )
        for logp in (chosen, rejected)
    ]
    params = ObjectiveParams(design="none", loss=name, beta=beta, label_smoothing=smoothing)
    loss = geb_objective(*sides, params).preference_loss
    expected = (1 - smoothing) * right + smoothing * wrong
    np.testing.assert_allclose(loss, expected, rtol=1e-9)
