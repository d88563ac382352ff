"""Properties that every row of the registry has, whatever its formula."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from objective_cases import DEFINED, REFUSED, bonus_and_gradient, bonus_of, saturation_of

GEB = ("one_minus_pi", "inverse_pi", "arctanh")
EVERY_CASE = pytest.mark.parametrize(("design", "divergence"), DEFINED)
LOGPS = st.lists(st.floats(-5000.0, 0.0, width=32), min_size=1, max_size=8)


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(logps=LOGPS)
@example(logps=[0.0, -5000.0])
@settings(max_examples=25, deadline=None)
def test_finite_value_and_gradient_everywhere(design, divergence, dtype, logps):
    logp = torch.tensor(logps, dtype=dtype)
    bonus, gradient = bonus_and_gradient(logp, design, divergence)
    assert bonus.isfinite().all(), f"{bonus} at {logp}"
    # An fp16 leaf rounds its own gradient to fp16, where anything above 65504 is infinite.
    assert gradient.isfinite().all() or dtype == torch.float16, f"{gradient} at {logp}"
    assert bonus.shape == logp.shape
    assert bonus.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("design", [*GEB, "feb"])
@pytest.mark.parametrize(("limit", "name"), [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_alpha_limits_are_continuous(design, limit, name):
    logp = torch.linspace(-30.0, -0.5, 100, dtype=torch.float64)
    ref_logp = logp - 1.0
    at_limit = bonus_and_gradient(logp, design, name, ref_logp=ref_logp)
    for distance in (1e-6, 1e-9, 1e-12, 1e-300):
        alpha = abs(limit - distance)
        near = bonus_and_gradient(logp, design, alpha, ref_logp=ref_logp)
        for have, want in zip(near, at_limit, strict=True):
            torch.testing.assert_close(
                have, want, rtol=100 * max(distance, 1e-13), atol=100 * distance
            )


def test_alpha_of_almost_zero_keeps_what_it_adds_to_the_logarithm():
    """(u^α − 1)/α at u = e^5000: float64 still has it, and log u is 2.5e-6 less."""
    logp = torch.tensor([-5000.0], dtype=torch.float64)
    for alpha in (1e-9, 5e-9):
        bonus = bonus_of(logp, "inverse_pi", alpha)
        assert bonus.item() == pytest.approx(math.expm1(5000.0 * alpha) / alpha, rel=1e-9)


def test_a_response_without_tokens_has_no_bonus():
    logp = torch.tensor([[-1.0, -9.0], [-1.0, -2.0]])
    mask = torch.tensor([[False, False], [True, True]])
    bonus = bonus_of(logp, "inverse_pi", "forward_kl", mask=mask, probability="token")
    torch.testing.assert_close(bonus, torch.tensor([0.0, 1.5]))


class TestSaturation:
    @pytest.mark.parametrize(
        ("design", "divergence", "numerics", "logp", "clamped", "underflowed"),
        [
            # log of the largest float32: 88.72.
            ("inverse_pi", "reverse_kl", "exact", [-88.7, -88.8], [0, 1], [0, 0]),
            # Long responses.
            ("one_minus_pi", "reverse_kl", "exact", [-50.0, -104.0], [0, 0], [0, 1]),
            # The logarithm of zero.
            ("one_minus_pi", "forward_kl", "exact", [0.0, -1e-6], [1, 0], [0, 0]),
            ("arctanh", "forward_kl", "exact", [0.0, -1e-6], [1, 0], [0, 0]),
            # Published forms are never clamped.
            ("inverse_pi", "reverse_kl", "paper", [-1.0, -200.0], [0, 0], [0, 1]),
            ("one_minus_pi", "reverse_kl", "paper", [-1.0, -200.0], [0, 0], [0, 1]),
        ],
    )
    def test_where_a_bonus_leaves_the_floats(
        self, design, divergence, numerics, logp, clamped, underflowed
    ):
        saturation = saturation_of(torch.tensor(logp), design, divergence, numerics=numerics)
        assert [flags.tolist() for flags in saturation] == [clamped, underflowed]

    def test_per_token_counts_responses(self):
        logp = torch.tensor([[-1.0, -104.0], [-104.0, -105.0], [-104.0, -1.0]])
        mask = torch.tensor([[True, True], [True, True], [True, False]])
        arguments = {"mask": mask, "probability": "token", "divergence": "reverse_kl"}
        _, underflowed = saturation_of(logp, design="one_minus_pi", **arguments)
        assert underflowed.tolist() == [False, True, True]
        assert saturation_of(logp, design="inverse_pi", **arguments)[0].all()

    @EVERY_CASE
    def test_saturated_exactly_where_the_gradient_is_lost(self, design, divergence):
        logp = torch.tensor([0.0, -1e-3, -1.0, -30.0, -90.0, -200.0, -5000.0])
        _, gradient = bonus_and_gradient(logp, design, divergence)
        clamped, underflowed = saturation_of(logp, design, divergence)
        assert not (clamped & underflowed).any()
        lost = torch.zeros_like(clamped) if design == "none" else gradient == 0
        assert (clamped | underflowed).tolist() == lost.tolist()


@pytest.mark.parametrize(("design", "divergence"), REFUSED)
def test_what_the_theory_does_not_define_is_refused(design, divergence):
    reason = "contains α" if design in GEB else "only .*set divergence to 'reverse_kl'"
    with pytest.raises(ValueError, match=f"'{design}' under {divergence!r}: .*{reason}"):
        bonus_of(torch.tensor([-1.0]), design, divergence)


@pytest.mark.parametrize("divergence", [0.25, "js"])
def test_what_the_published_code_does_not_have_is_refused(divergence):
    with pytest.raises(ValueError, match="published code has no form"):
        bonus_of(torch.tensor([-1.0]), "inverse_pi", divergence, numerics="paper")
