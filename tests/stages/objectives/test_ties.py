"""A tied pair has no preference loss; its bonus and NLL stay."""

from __future__ import annotations

import pytest
import torch

from stages.objectives import (
    METRIC_SUMS,
    ObjectiveSettings,
    ResponseLogps,
    geb_objective,
    loss_and_metrics,
    step_metrics,
)

SETTINGS = ObjectiveSettings(design="xpo", beta=0.5, nll_weight=0.3)
TIE = torch.tensor([False, True, False])


def sides() -> tuple[ResponseLogps, ResponseLogps]:
    chosen = torch.tensor([-3.0, -4.0, -9.0], requires_grad=True)
    rejected = torch.tensor([-5.0, -6.0, -7.0], requires_grad=True)
    reference, tokens = torch.tensor([-4.0, -5.0, -8.0]), torch.tensor([2, 3, 4])
    return (
        ResponseLogps(chosen, reference, num_tokens=tokens),
        ResponseLogps(rejected, reference, num_tokens=tokens),
    )


def test_only_the_preference_term_of_a_tie_is_zero():
    chosen, rejected = sides()
    plain = geb_objective(chosen, rejected, SETTINGS)
    tied = geb_objective(chosen, rejected, SETTINGS, TIE)
    assert tied.preference_loss[1] == 0.0
    assert torch.equal(tied.preference_loss[~TIE], plain.preference_loss[~TIE])
    assert torch.equal(tied.bonus, plain.bonus)
    assert torch.equal(tied.nll, plain.nll)


def test_a_tie_s_gradient_is_that_of_bonus_and_nll():
    chosen, rejected = sides()
    geb_objective(chosen, rejected, SETTINGS, TIE).loss(2.0).sum().backward()
    # −κ · L_bonus = κ log π(rejected), and 0.3 · (−log π(chosen) / 3 tokens).
    assert rejected.logp.grad[1] == pytest.approx(2.0)
    assert chosen.logp.grad[1] == pytest.approx(-0.1)


def test_accuracy_is_over_untied_pairs_and_means_are_over_all():
    chosen, rejected = sides()
    metrics = step_metrics(loss_and_metrics(chosen, rejected, SETTINGS, 2.0, TIE)[1])
    assert metrics["accuracy"] == 0.5
    loss = geb_objective(chosen, rejected, SETTINGS, TIE).loss(2.0)
    assert metrics["loss"] == pytest.approx(float(loss.detach().mean()))


def test_ties_alone_have_no_accuracy():
    chosen, rejected = sides()
    every = torch.ones(3, dtype=torch.bool)
    _, sums = loss_and_metrics(chosen, rejected, SETTINGS, 2.0, every)
    assert sums[METRIC_SUMS.index("num_preferences")] == 0
    assert step_metrics(sums)["accuracy"] == 0.0
    assert step_metrics(sums)["preference_loss"] == 0.0
