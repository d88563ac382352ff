"""The combined objective and the metrics of a step."""

import dataclasses
import math

import pytest
import torch
from objective_cases import DEFINED

from stages.objectives import (
    METRIC_SUMS,
    ObjectiveSettings,
    ResponseLogps,
    exploratory_bonus,
    geb_objective,
    loss_and_metrics,
    preference_loss,
    step_metrics,
)

TOKENS_CHOSEN = torch.tensor([[-0.5, -1.0, -0.25], [-2.0, -0.125, 0.0], [-0.5, -0.5, -3.0]])
TOKENS_REJECTED = torch.tensor([[-1.5, -1.0, 0.0], [-0.75, 0.0, 0.0], [-0.5, -4.0, -2.0]])
MASK_CHOSEN = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()
MASK_REJECTED = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()


def side(tokens, mask, ref_shift):
    ref_tokens = torch.where(mask, tokens + ref_shift, 0.0)
    return ResponseLogps(
        logp=tokens.sum(dim=1),
        ref_logp=ref_tokens.sum(dim=1),
        num_tokens=mask.sum(dim=1),
        token_logp=tokens,
        token_mask=mask,
        ref_token_logp=ref_tokens,
    )


CHOSEN = side(TOKENS_CHOSEN, MASK_CHOSEN, -0.25)
REJECTED = side(TOKENS_REJECTED, MASK_REJECTED, 0.125)


def metrics_of(*arguments, **options):
    return loss_and_metrics(*arguments, **options)[1]


def test_adds_up_the_terms():
    settings = ObjectiveSettings(design="inverse_pi", divergence="forward_kl", nll_weight=0.5)
    output = geb_objective(CHOSEN, REJECTED, settings)
    expected = (
        preference_loss(CHOSEN.logratio, REJECTED.logratio, beta=0.1, divergence="forward_kl")
        - 2.0 * -REJECTED.logp
        + 0.5 * -CHOSEN.logp / CHOSEN.num_tokens
    )
    torch.testing.assert_close(output.loss(2.0), expected)


@pytest.mark.parametrize(
    ("bonus_on", "expected"),
    [
        ("rejected", -REJECTED.logp),
        ("chosen", -CHOSEN.logp),
        ("all", -(REJECTED.logp + CHOSEN.logp) / 2),
    ],
)
def test_bonus_targets(bonus_on, expected):
    settings = ObjectiveSettings(design="inverse_pi", divergence="forward_kl", bonus_on=bonus_on)
    torch.testing.assert_close(geb_objective(CHOSEN, REJECTED, settings).bonus, expected)


@pytest.mark.parametrize("probability", ["sequence", "token_mean", "token"])
def test_probability_reaches_the_bonus(probability):
    settings = ObjectiveSettings(design="arctanh", divergence="hellinger", probability=probability)
    per_token = probability == "token"
    expected = exploratory_bonus(
        REJECTED.token_logp if per_token else REJECTED.logp,
        design="arctanh",
        divergence="hellinger",
        probability=probability,
        mask=REJECTED.token_mask,
        num_tokens=REJECTED.num_tokens,
    )
    torch.testing.assert_close(geb_objective(CHOSEN, REJECTED, settings).bonus, expected)


@pytest.mark.parametrize(("design", "divergence"), DEFINED)
@pytest.mark.parametrize("probability", ["sequence", "token_mean", "token"])
def test_every_objective_trains_and_reports(design, divergence, probability):
    settings = ObjectiveSettings(
        design=design, divergence=divergence, probability=probability, bonus_on="all"
    )
    metrics = step_metrics(metrics_of(CHOSEN, REJECTED, settings, 0.5))
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0.0 <= metrics["bonus_gradient_share"] <= 1.0
    assert (metrics["bonus_gradient_share"] > 0.0) == (design != "none")


def test_bonus_weighted_beyond_the_largest_float_stays_finite():
    rejected = ResponseLogps(torch.tensor([-87.0, -3.0]), torch.tensor([-80.0, -3.0]))
    chosen = ResponseLogps(torch.tensor([-5.0, -5.0]), torch.tensor([-5.0, -5.0]))
    settings = ObjectiveSettings(design="inverse_pi")
    assert geb_objective(chosen, rejected, settings).loss(1e6).mean().isfinite()
    metrics = step_metrics(metrics_of(chosen, rejected, settings, 1e6))
    assert metrics["bonus_clamped_share"] == 0.5
    assert step_metrics(metrics_of(chosen, rejected, settings, 1e-9))["bonus_clamped_share"] == 0.0


def test_metrics_by_hand():
    chosen = ResponseLogps(torch.tensor([-4.0, -6.0]), torch.tensor([-5.0, -6.0]))
    rejected = ResponseLogps(torch.tensor([-7.0, -5.0]), torch.tensor([-6.0, -8.0]))
    settings = ObjectiveSettings(design="xpo", beta=0.5)
    metrics = step_metrics(metrics_of(chosen, rejected, settings, kappa=0.1))
    losses = [math.log1p(math.exp(-0.5 * m)) for m in (2.0, -3.0)]
    pull = [0.5 / (1 + math.exp(0.5 * m)) for m in (2.0, -3.0)]
    expected = {
        "preference_loss": sum(losses) / 2,
        "bonus": 6.0,
        "loss": sum(losses) / 2 - 0.6,
        "nll": 0.0,
        "chosen_logratio": 0.5,
        "rejected_logratio": 1.0,
        "chosen_reward": 0.25,
        "rejected_reward": 0.5,
        "margin": -0.25,
        "accuracy": 0.5,
        "bonus_ratio": 1.2 / sum(losses),
        "bonus_gradient_share": 0.2 / (0.2 + 2 * sum(pull)),
        "bonus_clamped_share": 0.0,
        "bonus_underflowed_share": 0.0,
        "reward_clamped_share": 0.0,
    }
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_sums_add_over_micro_batches():
    def part(response, rows):
        return ResponseLogps(
            **{
                name: getattr(response, name)[rows]
                for name in ("logp", "ref_logp", "num_tokens", "token_logp", "token_mask")
            }
        )

    for probability in ("sequence", "token"):
        settings = ObjectiveSettings(design="arctanh", probability=probability, nll_weight=1.0)
        whole = metrics_of(CHOSEN, REJECTED, settings, 0.3)
        parts = sum(
            metrics_of(part(CHOSEN, rows), part(REJECTED, rows), settings, 0.3)
            for rows in (slice(0, 1), slice(1, 3))
        )
        assert len(whole) == len(METRIC_SUMS)
        torch.testing.assert_close(parts, whole)


def test_metrics_count_underflow_and_clamps():
    chosen = ResponseLogps(torch.tensor([-5.0, -5.0]), torch.tensor([-5.0, -5.0]))
    rejected = ResponseLogps(torch.tensor([-200.0, -5.0]), torch.tensor([-20.0, -5.0]))
    settings = ObjectiveSettings(design="one_minus_pi", divergence="forward_kl")
    metrics = step_metrics(metrics_of(chosen, rejected, settings, 1.0))
    assert metrics["bonus_underflowed_share"] == 0.5
    assert metrics["reward_clamped_share"] == 0.25


@pytest.mark.parametrize("probability", ["sequence", "token"])
def test_one_call_gives_the_objective_s_loss_and_metrics(probability):
    settings = ObjectiveSettings(design="arctanh", probability=probability, nll_weight=0.5)
    leaf = CHOSEN.token_logp.clone().requires_grad_()
    other = REJECTED.token_logp.clone().requires_grad_()
    gradients = []
    for loss_of in (
        lambda *sides: geb_objective(*sides, settings).loss(0.7),
        lambda *sides: loss_and_metrics(*sides, settings, 0.7)[0],
    ):
        sides = side(leaf, MASK_CHOSEN, -0.25), side(other, MASK_REJECTED, 0.125)
        gradients.append(torch.autograd.grad(loss_of(*sides).sum(), [leaf, other]))
    for one, two, mask in zip(*gradients, (MASK_CHOSEN, MASK_REJECTED), strict=True):
        assert torch.equal(one[mask], two[mask])


def test_metrics_leave_the_training_graph_alone():
    logp = torch.tensor([-3.0], requires_grad=True)
    chosen = ResponseLogps(logp * 2, torch.tensor([-5.0]))
    rejected = ResponseLogps(logp * 3, torch.tensor([-8.0]))
    loss, sums = loss_and_metrics(chosen, rejected, ObjectiveSettings(design="arctanh"), 1.0)
    assert not sums.requires_grad
    assert logp.grad is None
    loss.sum().backward()
    assert logp.grad is not None


def test_half_precision_log_probs_are_upcast():
    chosen = ResponseLogps(CHOSEN.logp.bfloat16(), CHOSEN.ref_logp.bfloat16())
    rejected = ResponseLogps(REJECTED.logp.bfloat16(), REJECTED.ref_logp.bfloat16())
    loss = geb_objective(chosen, rejected, ObjectiveSettings(design="arctanh")).loss(1.0)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"design": "selm", "divergence": "hellinger"}, "is not defined under hellinger"),
        ({"design": "arctanh", "divergence": "js"}, "is not an α-divergence"),
        ({"numerics": "paper", "design": "arctanh", "divergence": 0.3}, "numerics='paper'"),
        ({"beta": -0.1}, "beta must be positive"),
        ({"label_smoothing": 0.9}, "label_smoothing"),
        ({"nll_weight": -1.0}, "nll_weight must not be negative"),
        ({"bonus_on": "both"}, "bonus_on 'both' is unknown"),
        ({"probability": "words"}, "probability 'words' is unknown"),
    ],
)
def test_settings_refuse_what_is_not_defined(arguments, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveSettings(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"probability": "token", "design": "arctanh"}, "needs token_logp and token_mask"),
        ({"probability": "token_mean", "design": "arctanh"}, "needs num_tokens"),
        ({"nll_weight": 1.0}, "nll_weight needs num_tokens"),
    ],
)
def test_missing_log_probs_are_named(arguments, message):
    bare = ResponseLogps(torch.tensor([-3.0]), torch.tensor([-3.0]))
    with pytest.raises(ValueError, match=message):
        geb_objective(bare, bare, ObjectiveSettings(**arguments))


def test_log_probs_that_are_no_floats_are_named_by_the_nll():
    whole = ResponseLogps(torch.tensor([-3]), torch.tensor([-3.5]), torch.tensor([2]))
    fine = ResponseLogps(torch.tensor([-3.0]), torch.tensor([-3.5]), torch.tensor([2]))
    with pytest.raises(ValueError, match=r"^logp must be a floating-point .*torch\.int64"):
        geb_objective(whole, fine, ObjectiveSettings(nll_weight=1.0))


@pytest.mark.parametrize(
    ("settings", "missing", "message"),
    [
        ({"design": "feb", "probability": "token"}, "ref_token_logp", "needs ref_token_logp"),
        (
            {"design": "arctanh", "probability": "token"},
            "token_logp",
            r"token_mask \[B, T\] on the responses that get the bonu",
        ),
        (
            {"design": "arctanh", "probability": "token"},
            "token_mask",
            r"token_mask \[B, T\] on the responses that get the bonu",
        ),
        ({"length_normalised": True}, "num_tokens", "length_normalised needs num_tokens"),
    ],
)
def test_one_missing_value_is_named(settings, missing, message):
    response = dataclasses.replace(CHOSEN, **{missing: None})
    settings = ObjectiveSettings(**settings)
    assert settings.needs_ref_token_logps == (missing == "ref_token_logp")
    with pytest.raises(ValueError, match=message):
        geb_objective(response, response, settings)


def test_metrics_of_nothing_are_refused():
    with pytest.raises(ValueError, match="at least one pair"):
        step_metrics(torch.zeros(len(METRIC_SUMS)))


def test_label_smoothing_reaches_the_loss():
    settings = ObjectiveSettings(design="none", label_smoothing=0.2)
    expected = preference_loss(
        CHOSEN.logratio, REJECTED.logratio, beta=0.1, divergence="reverse_kl", label_smoothing=0.2
    )
    found = geb_objective(CHOSEN, REJECTED, settings).loss(1.0)
    torch.testing.assert_close(found, expected)
    plain = geb_objective(CHOSEN, REJECTED, ObjectiveSettings(design="none")).loss(1.0)
    assert not torch.allclose(found, plain)


def test_the_nll_pulls_the_chosen_response_up_with_the_preference():
    chosen = ResponseLogps(torch.tensor([-4.0]), torch.tensor([-4.0]), torch.tensor([2]))
    rejected = ResponseLogps(torch.tensor([-4.0]), torch.tensor([-4.0]), torch.tensor([2]))
    settings = ObjectiveSettings(design="xpo", beta=1.0, nll_weight=0.5)
    metrics = step_metrics(metrics_of(chosen, rejected, settings, kappa=1.0))
    # At margin 0 the preference pulls by ½ on either side, the NLL by weight / tokens = ¼ more on
    # the chosen one, and XPO's bonus, −log π, by 1 on the rejected one.
    assert metrics["bonus_gradient_share"] == pytest.approx(1.0 / (1.0 + 0.5 + 0.25 + 0.5))


def test_a_bonus_weighted_below_the_smallest_float_stays_finite():
    # log π of a sequence is SELM's bonus up to its sign: large and negative on one side.
    chosen = ResponseLogps(torch.tensor([-5.0]), torch.tensor([-5.0]))
    rejected = ResponseLogps(torch.tensor([-1.0]), torch.tensor([-3e38]))
    for design in ("selm", "vpo"):
        output = geb_objective(chosen, rejected, ObjectiveSettings(design=design))
        assert output.weighted_bonus(1e3).isfinite().all()
        assert output.weighted_bonus(-1e3).isfinite().all()


def test_reward_clamps_are_counted_by_pair():
    low, fine = torch.full((3,), -200.0), torch.full((3,), -5.0)
    side = ResponseLogps(low, torch.full((3,), -20.0))
    settings = ObjectiveSettings(design="none", divergence="forward_kl")
    for chosen, rejected, share in (
        (side, side, 1.0),
        (side, ResponseLogps(fine, fine), 0.5),
        (ResponseLogps(fine, fine), side, 0.5),
    ):
        metrics = step_metrics(metrics_of(chosen, rejected, settings, 1.0))
        assert metrics["reward_clamped_share"] == share


def test_a_margin_of_zero_is_no_preference_learnt():
    response = ResponseLogps(torch.tensor([-4.0]), torch.tensor([-5.0]))
    settings = ObjectiveSettings(design="none")
    assert step_metrics(metrics_of(response, response, settings, 1.0))["accuracy"] == 0.0


def test_log_probs_of_tokens_are_not_read_where_the_bonus_is_of_the_sequence():
    settings = ObjectiveSettings(design="arctanh")
    expected = metrics_of(CHOSEN, REJECTED, settings, 0.7)
    for token_logp in (None, torch.full_like(TOKENS_CHOSEN, math.nan)):
        chosen, rejected = (
            dataclasses.replace(side, token_logp=token_logp) for side in (CHOSEN, REJECTED)
        )
        torch.testing.assert_close(metrics_of(chosen, rejected, settings, 0.7), expected)


@pytest.mark.parametrize("divergence", ["reverse_kl", "hellinger", "forward_kl", "js", 0.3])
def test_length_normalised_loss_compares_log_ratios_per_token(divergence):
    lengths = torch.tensor([4, 10, 1]), torch.tensor([2, 5, 3])
    sides = [
        dataclasses.replace(side, num_tokens=number)
        for side, number in zip((CHOSEN, REJECTED), lengths, strict=True)
    ]
    settings = ObjectiveSettings(divergence=divergence, beta=5.0, length_normalised=True)
    found = geb_objective(*sides, settings)
    per_token = [side.logratio / side.num_tokens for side in sides]
    expected = preference_loss(*per_token, beta=5.0, divergence=divergence)
    torch.testing.assert_close(found.preference_loss, expected)
    if divergence == "reverse_kl":
        closed = -torch.nn.functional.logsigmoid(5.0 * (per_token[0] - per_token[1]))
        torch.testing.assert_close(found.preference_loss, closed)
    torch.testing.assert_close(found.chosen_logratio, CHOSEN.logratio)


def test_length_normalised_loss_of_a_doubled_response_is_the_same():
    """Twice the tokens with twice the log-ratio: the same per token, another one summed."""
    doubled = ResponseLogps(2 * CHOSEN.logp, 2 * CHOSEN.ref_logp, torch.tensor([8, 8, 8]))
    one = dataclasses.replace(CHOSEN, num_tokens=torch.tensor([4, 4, 4]))
    other = dataclasses.replace(REJECTED, num_tokens=torch.tensor([4, 4, 4]))
    for normalised in (True, False):
        settings = ObjectiveSettings(length_normalised=normalised)
        losses = [geb_objective(side, other, settings).preference_loss for side in (one, doubled)]
        assert torch.allclose(*losses) == normalised
