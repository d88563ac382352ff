"""The bandit's learning loop."""

import pytest
import torch

from experiments import bandit
from experiments.bandit import KAPPAS, REFERENCE, REWARDS, loss, sample, simulate, table
from tests.flows.loop import geb

F_DPO = ("none", "reverse_kl", 0.0)
GEB = ("one_minus_pi", "reverse_kl", 1.0)


def test_the_reference_rarely_plays_the_best_arm():
    assert REFERENCE.sum().item() == pytest.approx(1.0)
    assert REFERENCE.argmax() == 300
    assert REWARDS.argmax() == 750
    assert REWARDS.max() == 1.0
    assert REWARDS[300] == pytest.approx(0.6)
    best_region = REWARDS > 0.6
    assert best_region[[690, 750, 810]].all()
    assert not best_region[:680].any()
    assert REFERENCE[best_region].sum() < 2e-4


def test_samples_follow_the_policy(monkeypatch):
    monkeypatch.setattr(bandit, "NUM_ROLLOUTS", 200_000)
    monkeypatch.setattr(bandit, "NUM_ARMS", 7)
    policies = torch.randn(3, 7, dtype=torch.float64).softmax(dim=-1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    counts = torch.nn.functional.one_hot(sample(policies, generators), 7).double().mean(dim=-2)
    torch.testing.assert_close(counts, policies, atol=6e-3, rtol=0)


def pull(method, rewards, kappa=1.0):
    """Gradient of a game's loss with respect to log π of two rollouts."""
    logp = torch.full((1, 2), -3.0, dtype=torch.float64, requires_grad=True)
    pair = torch.tensor([rewards], dtype=torch.float64)
    losses = loss((method, "reverse_kl", kappa), logp, pair)
    (gradient,) = torch.autograd.grad(losses.sum(), logp)
    return gradient[0].tolist()


def test_f_dpo_pulls_the_better_rollout_up_and_the_other_down():
    # β σ(0) = 0.1 / 2.
    assert pull("none", [0.9, 0.1]) == pytest.approx([-0.05, 0.05])
    assert pull("none", [0.1, 0.9]) == pytest.approx([0.05, -0.05])
    assert pull("none", [0.5, 0.5]) == [0, 0], "a tie has no preference"


@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_bonus_is_on_the_rejected_rollout_and_a_tie_keeps_it(kappa):
    # XPO's bonus is −log π: its loss is κ log π.
    assert pull("xpo", [0.9, 0.1], kappa) == pytest.approx([-0.05, 0.05 + kappa])
    assert pull("xpo", [0.5, 0.5], kappa) == pytest.approx([0, kappa])


def test_geb_leaves_the_local_optimum_and_f_dpo_stays_in_it():
    _, f_dpo = simulate(F_DPO, 2, 1000)
    policies, geb = simulate(GEB, 2, 1000)
    assert (f_dpo[:, -1] < 0.01).all()
    assert (geb[:, -1] > 0.5).all()
    assert not torch.equal(policies[0], policies[1])
    # A result depends on its game and seed alone.
    alone, _ = simulate(GEB, 1, 1000)
    torch.testing.assert_close(alone[0], policies[0], rtol=0, atol=0)


def test_the_table_says_in_how_many_seeds_the_best_region_is_found():
    policies = torch.zeros(2, 1000, dtype=torch.float64)
    policies[0, [300, 750]] = torch.tensor([0.1, 0.9], dtype=torch.float64)
    policies[1, [300, 750]] = torch.tensor([0.7, 0.3], dtype=torch.float64)
    mass = torch.tensor([[0.6, 0.4, 0.9], [0.1, 0.2, 0.3]], dtype=torch.float64)
    [row] = table({F_DPO: (policies, mass)}).rows
    assert row[2:5] == ["–", "50%", "50%"]
    assert str(row[5]).startswith("0.840 ± ")
    assert row[6] == "150"


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_the_figure(tmp_path):
    result = geb("bandit", "--iterations", 50, "--seeds", 2, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "GEB 1+α−π" in result.stdout
    assert "| reverse KL | GEB 1+α−π | 1 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")
