"""The bandit's learning loop."""

import pytest
import torch

from experiments.bandit import (
    BanditCell,
    BanditSettings,
    Landscape,
    Outcome,
    bandit_cells,
    logits_gradient,
    make_landscape,
    sample,
    simulate,
    table,
)
from stages.contract.errors import UserError
from tests.flows.loop import geb, geb_refused

FLOOR = BanditSettings().reference_floor


def small(**changes):
    defaults = {
        "methods": ("none", "inverse_pi"),
        "divergences": ("reverse_kl", "forward_kl"),
        "kappas": (1.0,),
        "num_seeds": 2,
        "num_iterations": 30,
    }
    return BanditSettings(**(defaults | changes))


def run(params):
    return simulate(params, make_landscape(params.reference_floor))


def two_arms(reference):
    """A bandit whose second arm pays, of which the reference plays the first with a probability."""
    probabilities = torch.tensor([reference, 1 - reference], dtype=torch.float64)
    return Landscape(probabilities, torch.tensor([0.6, 1.0], dtype=torch.float64))


def policies(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 7, generator=generator, dtype=torch.float64).softmax(dim=-1)


def test_landscape_hides_the_best_arm_from_the_reference():
    landscape = make_landscape(FLOOR)
    assert landscape.reference.sum().item() == pytest.approx(1.0)
    assert landscape.reference.argmax() == 300
    assert landscape.rewards.argmax() == 750
    assert landscape.rewards.max() == 1.0
    assert landscape.rewards[300] == pytest.approx(0.6)
    best_region = landscape.rewards > 0.6
    assert best_region[[690, 750, 810]].all()
    assert not best_region[:680].any()
    assert landscape.reference[best_region].sum() < 2e-4


def test_cells_leave_out_what_is_not_defined_and_give_f_dpo_no_kappa():
    params = small(methods=("none", "xpo", "arctanh"), kappas=(0.1, 1.0))
    assert bandit_cells(params) == [
        BanditCell("none", "reverse_kl", 0.0),
        BanditCell("xpo", "reverse_kl", 0.1),
        BanditCell("xpo", "reverse_kl", 1.0),
        BanditCell("arctanh", "reverse_kl", 0.1),
        BanditCell("arctanh", "reverse_kl", 1.0),
        BanditCell("none", "forward_kl", 0.0),
        BanditCell("arctanh", "forward_kl", 0.1),
        BanditCell("arctanh", "forward_kl", 1.0),
    ]


def test_samples_follow_the_policy():
    policy = policies()
    uniform = (torch.arange(20000, dtype=torch.float64) / 20000).expand(3, -1)
    arms = sample(policy, uniform)
    counts = torch.nn.functional.one_hot(arms, 7).double().mean(dim=-2)
    torch.testing.assert_close(counts, policy, atol=2e-4, rtol=0)


def test_logits_gradient_equals_autodiff():
    logits = policies().log().requires_grad_()
    arms = torch.randint(7, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    pull = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (pull * logits.log_softmax(dim=-1).gather(-1, arms)).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits_gradient(pull, arms, policies(), max_norm=0.0), logits.grad)


def test_clipping_is_per_policy_and_survives_the_largest_floats():
    policy = torch.full((4, 1, 2), 0.5, dtype=torch.float64)
    arms = torch.zeros(4, 1, 1, dtype=torch.long)
    pull = torch.tensor([0.2, 8.0, 1e300, 0.0], dtype=torch.float64)[:, None, None]
    half = 0.5**0.5
    lengths = torch.tensor([[0.1], [half], [half], [0.0]], dtype=torch.float64)
    expected = torch.stack([lengths, -lengths], dim=-1)
    torch.testing.assert_close(logits_gradient(pull, arms, policy, max_norm=1.0), expected)
    unclipped = logits_gradient(pull, arms, policy, max_norm=0.0)
    torch.testing.assert_close(unclipped[:, 0, 0], pull.flatten() / 2)


def test_a_result_depends_only_on_its_cell_and_seed():
    whole = run(small())
    place = bandit_cells(small()).index(BanditCell("inverse_pi", "forward_kl", 1.0))
    alone = run(small(methods=("inverse_pi",), divergences=("forward_kl",), num_seeds=1))
    torch.testing.assert_close(alone.policy[0, 0], whole.policy[place, 0], rtol=0, atol=0)
    assert not torch.equal(whole.policy[place, 0], whole.policy[place, 1])


def test_one_sgd_step_by_hand():
    """One pair, f-DPO, β = 0.1: the chosen arm's logit rises by lr·β/2, the other's falls by it."""
    params = small(
        methods=("none",),
        divergences=("reverse_kl",),
        num_seeds=1,
        num_rollouts=2,
        num_iterations=1,
        optimizer="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
    )
    landscape = make_landscape(FLOOR)
    change = simulate(params, landscape).policy[0, 0].log() - landscape.reference.log()
    moved = (change - change.median()).abs() > 1e-9
    arms = moved.nonzero().flatten().tolist()
    assert len(arms) == 2
    better, worse = sorted(arms, key=lambda arm: -landscape.rewards[arm].item())
    assert (change[better] - change.median()).item() == pytest.approx(0.05)
    assert (change[worse] - change.median()).item() == pytest.approx(-0.05)


def test_dropped_ties_have_no_bonus_and_kept_ones_do():
    def change(ties):
        # Two arms, of which the reference plays one: the only pair of the only iteration ties.
        params = small(
            methods=("inverse_pi",),
            divergences=("forward_kl",),
            optimizer="sgd",
            learning_rate=1.0,
            num_seeds=1,
            num_rollouts=2,
            num_iterations=1,
            ties=ties,
        )
        landscape = two_arms(0.99)
        return simulate(params, landscape).policy[0, 0, 0] - landscape.reference[0]

    assert abs(change("drop")) < 1e-12
    assert change("keep") < -1e-6


def test_geb_leaves_the_local_optimum_where_f_dpo_stays():
    outcome = run(
        small(methods=("none", "one_minus_pi"), divergences=("reverse_kl",), num_iterations=1000)
    )
    f_dpo, geb = outcome.best_mass[:, :, -1]
    assert (f_dpo < 0.01).all()
    assert (geb > 0.5).all()


def test_only_the_initial_reference_remembers_what_is_learnt_already():
    def best_after(reference, num_iterations):
        params = small(
            methods=("none",),
            divergences=("reverse_kl",),
            reference=reference,
            optimizer="sgd",
            learning_rate=1.0,
            beta=1000.0,
            num_iterations=num_iterations,
        )
        return simulate(params, two_arms(0.5)).policy[0, 0, 1].item()

    first = best_after("initial", 1)
    assert best_after("previous", 1) == first > 0.55
    assert best_after("initial", 2) == pytest.approx(first)
    assert best_after("previous", 2) > first + 0.05


@pytest.mark.parametrize("reference", ["previous", "initial"])
@pytest.mark.parametrize("numerics", ["exact", "paper"])
@pytest.mark.parametrize("bonus_on", ["rejected", "all", "chosen"])
def test_every_method_stays_a_distribution(reference, numerics, bonus_on):
    params = small(
        methods=BanditSettings().methods,
        divergences=BanditSettings().divergences,
        kappas=(10.0,),
        reference=reference,
        numerics=numerics,
        bonus_on=bonus_on,
    )
    policy = run(params).policy
    assert policy.isfinite().all()
    torch.testing.assert_close(policy.sum(dim=-1), torch.ones_like(policy[..., 0]))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("kapas=[1.0]", "kapas: no such setting; did you mean 'kappas'?"),
        ("kappas=[]", "kappas"),
        ("kappas=[0.0, 1.0]", "greater than 0"),
        ("num_rollouts=7", "multiple of 2"),
        ("methods=[gebb]", "the bandit has no ['gebb']"),
        ("divergences=[hellinger]", "is defined under"),
    ],
)
def test_a_refused_setting_is_named(setting, message):
    assert message in geb_refused("bandit", "--set", "methods=[xpo]", "--set", setting)


def test_a_policy_that_is_not_finite_is_named_with_its_cell():
    """The published log(1 − π) is not finite where one arm has all of π."""
    params = small(methods=("none", "one_minus_pi"), numerics="paper")
    with pytest.raises(UserError, match=r"1 of 4 cells .*one_minus_pi.*forward_kl"):
        simulate(params, two_arms(1.0 - 1e-300))


def test_the_command_prints_the_table_and_writes_the_figures(tmp_path):
    small = ("num_iterations=30", "num_seeds=2", "kappas=1.0", "methods=[none, one_minus_pi]")
    settings = [word for setting in small for word in ("--set", setting)]
    result = geb("bandit", *settings, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "GEB 1+α−π" in result.stdout
    written = (tmp_path / "table.md").read_text()
    assert "| reverse KL | GEB 1+α−π | 1 |" in written
    for figure in ("reference.png", "policies.png"):
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")


def test_the_table_says_in_how_many_seeds_the_best_region_is_found():
    settings = small(methods=("none",), divergences=("reverse_kl",), num_seeds=2)
    landscape = two_arms(0.5)
    mass = torch.tensor([[[0.6, 0.4, 0.9], [0.1, 0.2, 0.3]]], dtype=torch.float64)
    policy = torch.tensor([[[0.1, 0.9], [0.7, 0.3]]], dtype=torch.float64)
    [row] = table(settings, Outcome([50, 100, 150], mass, policy), landscape).rows
    assert row[2:5] == ["–", "50%", "50%"]
    assert row[5].startswith("0.840 ± ")
    assert row[6] == "150"
