"""The combined objective and the metrics of a step."""

import math

import pytest
import torch
from objective_cases import DEFINED, bonus_of

from stages.objectives.objective import ResponseLogps, geb_objective, preference_loss
from stages.objectives.pair_loss import METRIC_SUMS, loss_and_metrics, step_metrics
from stages.objectives.params import ObjectiveParams

TOKENS_CHOSEN = torch.tensor([[-0.5, -1.0, -0.25], [-2.0, -0.125, 0.0], [-0.5, -0.5, -3.0]])
TOKENS_REJECTED = torch.tensor([[-1.5, -1.0, 0.0], [-0.75, 0.0, 0.0], [-0.5, -4.0, -2.0]])
MASK_CHOSEN = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()
MASK_REJECTED = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()


def side(tokens, mask, ref_shift):
    if not tokens.requires_grad:
        tokens = tokens.clone().requires_grad_()
    return ResponseLogps(tokens, (tokens + ref_shift).detach(), mask)


def responses(logp, ref_logp, num_tokens=1):
    """Responses of a number of tokens that share log π and log π_ref evenly."""
    shape = (len(logp), num_tokens)
    tokens = (torch.tensor(logp) / num_tokens)[:, None].expand(shape).clone().requires_grad_()
    ref_tokens = (torch.tensor(ref_logp) / num_tokens)[:, None].expand(shape)
    return ResponseLogps(tokens, ref_tokens, torch.ones(shape, dtype=torch.bool))


CHOSEN = side(TOKENS_CHOSEN, MASK_CHOSEN, -0.25)
REJECTED = side(TOKENS_REJECTED, MASK_REJECTED, 0.125)


def metrics_of(*arguments, **options):
    return loss_and_metrics(*arguments, **options)[1]


def test_adds_up_the_terms():
    settings = ObjectiveParams(design="inverse_pi", divergence="forward_kl", nll_weight=0.5)
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
    settings = ObjectiveParams(design="inverse_pi", divergence="forward_kl", bonus_on=bonus_on)
    torch.testing.assert_close(geb_objective(CHOSEN, REJECTED, settings).bonus, expected)


@pytest.mark.parametrize("probability", ["sequence", "token_mean", "token"])
def test_probability_reaches_the_bonus(probability):
    settings = ObjectiveParams(design="arctanh", divergence="hellinger", probability=probability)
    expected = bonus_of(
        REJECTED.token_logp if probability == "token" else REJECTED.logp,
        "arctanh",
        "hellinger",
        probability=probability,
        mask=REJECTED.mask,
        num_tokens=REJECTED.num_tokens,
    )
    torch.testing.assert_close(geb_objective(CHOSEN, REJECTED, settings).bonus, expected)


@pytest.mark.parametrize(("design", "divergence"), DEFINED)
@pytest.mark.parametrize("probability", ["sequence", "token_mean", "token"])
def test_every_objective_trains_and_reports(design, divergence, probability):
    settings = ObjectiveParams(
        design=design, divergence=divergence, probability=probability, bonus_on="all"
    )
    metrics = step_metrics(metrics_of(CHOSEN, REJECTED, settings, 0.5))
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0.0 <= metrics["bonus_gradient_share"] <= 1.0
    assert (metrics["bonus_gradient_share"] > 0.0) == (design != "none")


def test_bonus_weighted_beyond_the_largest_float_stays_finite():
    rejected = responses([-87.0, -3.0], [-80.0, -3.0])
    chosen = responses([-5.0, -5.0], [-5.0, -5.0])
    settings = ObjectiveParams(design="inverse_pi")
    assert geb_objective(chosen, rejected, settings).loss(1e6).mean().isfinite()
    metrics = step_metrics(metrics_of(chosen, rejected, settings, 1e6))
    assert metrics["bonus_clamped_share"] == 0.5
    assert step_metrics(metrics_of(chosen, rejected, settings, 1e-9))["bonus_clamped_share"] == 0.0


def test_metrics_by_hand():
    chosen, rejected = responses([-4.0, -6.0], [-5.0, -6.0]), responses([-7.0, -5.0], [-6.0, -8.0])
    settings = ObjectiveParams(design="xpo", beta=0.5)
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
        logps = response.token_logp, response.ref_token_logp, response.mask
        return ResponseLogps(*(logp[rows] for logp in logps))

    for probability in ("sequence", "token"):
        settings = ObjectiveParams(design="arctanh", probability=probability, nll_weight=1.0)
        whole = metrics_of(CHOSEN, REJECTED, settings, 0.3)
        parts = sum(
            metrics_of(part(CHOSEN, rows), part(REJECTED, rows), settings, 0.3)
            for rows in (slice(0, 1), slice(1, 3))
        )
        assert len(whole) == len(METRIC_SUMS)
        torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("probability", ["sequence", "token"])
def test_one_call_gives_the_objective_s_loss_and_metrics(probability):
    settings = ObjectiveParams(design="arctanh", probability=probability, nll_weight=0.5)
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


def test_the_nll_pulls_the_chosen_response_up_with_the_preference():
    chosen, rejected = (responses([-4.0], [-4.0], num_tokens=2) for _ in range(2))
    settings = ObjectiveParams(design="xpo", beta=1.0, nll_weight=0.5)
    metrics = step_metrics(metrics_of(chosen, rejected, settings, kappa=1.0))
    # At margin 0 the preference pulls by ½ on either side, the NLL by weight / tokens = ¼ more on
    # the chosen one, and XPO's bonus, −log π, by 1 on the rejected one.
    assert metrics["bonus_gradient_share"] == pytest.approx(1.0 / (1.0 + 0.5 + 0.25 + 0.5))


def test_reward_clamps_are_counted_by_pair():
    settings = ObjectiveParams(design="none", divergence="forward_kl")
    low, fine = responses([-200.0] * 3, [-20.0] * 3), responses([-5.0] * 3, [-5.0] * 3)
    for chosen, rejected, share in ((low, low, 1.0), (low, fine, 0.5), (fine, low, 0.5)):
        metrics = step_metrics(metrics_of(chosen, rejected, settings, 1.0))
        assert metrics["reward_clamped_share"] == share


@pytest.mark.parametrize("divergence", ["reverse_kl", "hellinger", "forward_kl", "js", 0.3])
def test_length_normalised_loss_compares_log_ratios_per_token(divergence):
    settings = ObjectiveParams(
        design="none", divergence=divergence, beta=5.0, length_normalised=True
    )
    output = geb_objective(CHOSEN, REJECTED, settings)
    per_token = [side.logratio / side.num_tokens for side in (CHOSEN, REJECTED)]
    expected = preference_loss(*per_token, beta=5.0, divergence=divergence)
    torch.testing.assert_close(output.preference_loss, expected)
    if divergence == "reverse_kl":
        closed = -torch.nn.functional.logsigmoid(5.0 * (per_token[0] - per_token[1]))
        torch.testing.assert_close(output.preference_loss, closed)


# A tied pair has no preference loss; its bonus and NLL stay.
TIE_SETTINGS = ObjectiveParams(design="xpo", beta=0.5, nll_weight=0.3)
TIE = torch.tensor([False, True, False])


def tie_sides():
    reference = [-4.0, -5.0, -8.0]
    return (
        responses([-3.0, -4.0, -9.0], reference, num_tokens=3),
        responses([-5.0, -6.0, -7.0], reference, num_tokens=3),
    )


def test_only_the_preference_term_of_a_tie_is_zero():
    chosen, rejected = tie_sides()
    plain = geb_objective(chosen, rejected, TIE_SETTINGS)
    tied = geb_objective(chosen, rejected, TIE_SETTINGS, TIE)
    assert tied.preference_loss[1] == 0.0
    assert torch.equal(tied.preference_loss[~TIE], plain.preference_loss[~TIE])
    assert torch.equal(tied.bonus, plain.bonus)
    assert torch.equal(tied.nll, plain.nll)


def test_accuracy_is_over_untied_pairs_and_means_are_over_all():
    chosen, rejected = tie_sides()
    metrics = step_metrics(loss_and_metrics(chosen, rejected, TIE_SETTINGS, 2.0, TIE)[1])
    assert metrics["accuracy"] == 0.5
    loss = geb_objective(chosen, rejected, TIE_SETTINGS, TIE).loss(2.0)
    assert metrics["loss"] == pytest.approx(float(loss.detach().mean()))


def test_ties_alone_have_no_accuracy():
    chosen, rejected = tie_sides()
    every = torch.ones(3, dtype=torch.bool)
    _, sums = loss_and_metrics(chosen, rejected, TIE_SETTINGS, 2.0, every)
    assert sums[METRIC_SUMS.index("num_preferences")] == 0
    assert step_metrics(sums)["accuracy"] == 0.0
    assert step_metrics(sums)["preference_loss"] == 0.0
