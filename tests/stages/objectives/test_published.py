"""Published forms (numerics="paper") against numpy float64, and the gradients they lead to."""

import math

import numpy as np
import pytest
import torch
from objective_cases import DEFINED, bonus_and_gradient, bonus_of

from stages.objectives.designs import PUBLISHED_BONUSES

EPS = 1e-5

# Written from the formulas: p is the response's probability.
NUMPY_FORMS = {
    ("one_minus_pi", "reverse_kl"): lambda p: -p,
    ("one_minus_pi", "forward_kl"): lambda p: np.log(1 - p),
    ("one_minus_pi", "hellinger"): lambda p: np.sqrt(1.5 - p),
    ("inverse_pi", "reverse_kl"): lambda p: 1 / (p + EPS),
    ("inverse_pi", "forward_kl"): lambda p: -np.log(p),
    ("inverse_pi", "hellinger"): lambda p: 1 / (np.sqrt(p) + EPS),
    ("arctanh", "reverse_kl"): lambda p: np.arctanh(1 - p - EPS),
    ("arctanh", "forward_kl"): lambda p: np.log(np.arctanh(1 - p - EPS)),
    ("arctanh", "hellinger"): lambda p: np.sqrt(np.arctanh(1 - p - EPS) + 0.5),
}


@pytest.mark.parametrize("case", PUBLISHED_BONUSES)
def test_equals_the_published_formula(case):
    logp = np.linspace(-60.0, -0.01, 500)
    bonus = bonus_of(torch.from_numpy(logp), *case, numerics="paper")
    np.testing.assert_allclose(bonus.numpy(), NUMPY_FORMS[case](np.exp(logp)), rtol=1e-6)


@pytest.mark.parametrize(
    "case", [c for c in DEFINED if c[0] in ("none", "feb", "selm", "xpo", "vpo")]
)
def test_baselines_have_one_form(case):
    logp = torch.tensor([-0.5, -9.0])
    torch.testing.assert_close(bonus_of(logp, *case, numerics="paper"), bonus_of(logp, *case))


def slope(design, divergence, logp, numerics):
    logps = torch.tensor([logp])
    _, gradient = bonus_and_gradient(logps, design, divergence, numerics=numerics)
    return abs(gradient.item())


# |d bonus / d log π| in float32, two digits as measured: (−11.5, −50, −104).
GRADIENTS_OF_PUBLISHED_FORMS = [
    ("inverse_pi", "reverse_kl", (2.5e4, 1.9e-12, 0.0)),
    ("inverse_pi", "hellinger", (156.0, 0.07, 1e-13)),
    ("inverse_pi", "forward_kl", (1.0, 1.0, 1.0)),
    ("arctanh", "reverse_kl", (0.25, 1e-17, 0.0)),
    ("arctanh", "hellinger", (0.05, 2e-18, 0.0)),
    ("arctanh", "forward_kl", (0.04, 2e-18, 0.0)),
]


@pytest.mark.parametrize(("design", "divergence", "expected"), GRADIENTS_OF_PUBLISHED_FORMS)
def test_gradients_of_the_published_forms_vanish(design, divergence, expected):
    for logp, want in zip((-11.5, -50.0, -104.0), expected, strict=True):
        have = slope(design, divergence, logp, "paper")
        if want == 0.0:
            assert have < 1e-35, f"at {logp}"
        else:
            assert have == pytest.approx(want, rel=0.35), f"at {logp}"


@pytest.mark.parametrize("divergence", ["reverse_kl", "hellinger", "forward_kl"])
def test_one_minus_pi_vanishes_in_truth(divergence):
    # In float32 1 − π rounds to 1, and the gradient with it; π itself is what is left.
    for logp, bound in ((-11.5, 1.02e-5), (-50.0, 2e-22), (-104.0, 0.0)):
        for numerics in ("paper", "exact"):
            assert slope("one_minus_pi", divergence, logp, numerics) <= bound


def test_published_arctanh_is_nan_for_short_sure_answers():
    logp = torch.tensor([-1e-6])
    assert math.isnan(bonus_of(logp, "arctanh", "forward_kl", numerics="paper").item())
    assert math.isfinite(bonus_of(logp, "arctanh", "forward_kl").item())
