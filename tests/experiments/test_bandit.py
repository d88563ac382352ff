"""The bandit's learning loop."""

import pytest
import torch

from experiments import bandit
from experiments.bandit import GAMES, KAPPAS, REFERENCE, REWARDS, loss, sample, simulate, table
from tests.flows.loop import geb

F_DPO = GAMES.index(("none", "reverse_kl"))
GEB = GAMES.index(("one_minus_pi", "reverse_kl"))


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
    policy = torch.randn(2, 1, 3, 7, dtype=torch.float64).softmax(dim=-1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    counts = torch.nn.functional.one_hot(sample(policy, generators), 7).double().mean(dim=-2)
    torch.testing.assert_close(counts, policy, atol=6e-3, rtol=0)


def pull(method, rewards):
    """Gradient of a game's loss with respect to log π of two rollouts, for each κ, [K, 2]."""
    logp = torch.full((len(KAPPAS), 1, 2), -3.0, dtype=torch.float64, requires_grad=True)
    pair = torch.tensor(rewards, dtype=torch.float64).expand(len(KAPPAS), 1, 2)
    (gradient,) = torch.autograd.grad(loss(method, "reverse_kl", logp, pair).sum(), logp)
    return gradient[:, 0]


def test_f_dpo_pulls_the_better_rollout_up_and_the_other_down():
    # β σ(0) = 0.1 / 2, whatever κ is.
    half = torch.full((len(KAPPAS),), 0.05, dtype=torch.float64)
    torch.testing.assert_close(pull("none", [0.9, 0.1]), torch.stack([-half, half], dim=1))
    torch.testing.assert_close(pull("none", [0.1, 0.9]), torch.stack([half, -half], dim=1))
    assert not pull("none", [0.5, 0.5]).any(), "a tie has no preference"


def test_the_bonus_is_on_the_rejected_rollout_and_a_tie_keeps_it():
    # XPO's bonus is −log π: its loss is κ log π.
    kappas = torch.tensor(KAPPAS, dtype=torch.float64)
    bonus = pull("xpo", [0.9, 0.1]) - pull("none", [0.9, 0.1])
    torch.testing.assert_close(bonus, torch.stack([torch.zeros_like(kappas), kappas], dim=1))
    torch.testing.assert_close(pull("xpo", [0.5, 0.5]), bonus)


def test_geb_leaves_the_local_optimum_and_f_dpo_stays_in_it(monkeypatch):
    monkeypatch.setattr(bandit, "GAMES", [GAMES[F_DPO], GAMES[GEB]])
    policy, best_mass = simulate(2, 1000)
    f_dpo, geb = best_mass[:, 1, :, -1]
    assert (f_dpo < 0.01).all()
    assert (geb > 0.5).all()
    # A result depends on its game and seed alone.
    monkeypatch.setattr(bandit, "GAMES", [GAMES[GEB]])
    alone, _ = simulate(1, 1000)
    torch.testing.assert_close(alone[0, :, 0], policy[1, :, 0], rtol=0, atol=0)
    assert not torch.equal(policy[1, :, 0], policy[1, :, 1])


def test_the_table_says_in_how_many_seeds_the_best_region_is_found(monkeypatch):
    monkeypatch.setattr(bandit, "GAMES", [GAMES[F_DPO]])
    policy = torch.zeros(1, 1, 2, 1000, dtype=torch.float64)
    policy[0, 0, 0, [300, 750]] = torch.tensor([0.1, 0.9], dtype=torch.float64)
    policy[0, 0, 1, [300, 750]] = torch.tensor([0.7, 0.3], dtype=torch.float64)
    mass = torch.tensor([[[[0.6, 0.4, 0.9], [0.1, 0.2, 0.3]]]], dtype=torch.float64)
    [row] = table(policy, mass).rows
    assert row[2:5] == ["–", "50%", "50%"]
    assert str(row[5]).startswith("0.840 ± ")
    assert row[6] == "150"


def test_the_command_prints_the_table_and_writes_the_figure(tmp_path):
    result = geb("bandit", "--iterations", 50, "--seeds", 2, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "GEB 1+α−π" in result.stdout
    assert "| reverse KL | GEB 1+α−π | 1 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")
