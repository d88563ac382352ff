"""Objectives by a function in a file of the user's."""

import numpy as np
import pytest
import torch

from examples.objective import chi_po
from stages.contract.errors import UserError
from stages.objectives.objective import ResponseLogps
from stages.train.own_objective import UserObjective, made_up
from tests.programs import ROOT
from tests.stages.train.train_helpers import train

BY_HAND = """
import torch.nn.functional as F

def objective(chosen, rejected, beta=1.0):
    terms = {"loss": -F.logsigmoid(beta * (chosen.logratio - rejected.logratio))}
    if beta == 1.0:
        terms["bonus"] = 1.0 - rejected.logp.exp()
    return terms
"""


def written(folder, code):
    path = folder / "objective.py"
    path.write_text(code)
    return path


def test_a_function_equal_to_the_settings_trains_the_same_policy(tmp_path, policy, pairs, trained):
    code = written(tmp_path, BY_HAND)
    custom = train(
        tmp_path / "store", policy, [pairs], objective="python", code=code, design="none"
    )
    for mine, theirs in zip(custom.records, trained.records, strict=True):
        for name in ("loss", "preference_loss", "bonus", "bonus_ratio", "accuracy", "kappa"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_terms_that_are_left_out_are_as_the_settings_say(tmp_path, policy, pairs, trained):
    loss = "def objective(chosen, rejected):\n    return {'loss': 0.0 * chosen.logp + 2.0}\n"
    code = written(tmp_path, loss)
    mine = train(tmp_path / "store", policy, [pairs], objective="python", code=code)
    assert mine.records[0]["bonus"] == pytest.approx(trained.records[0]["bonus"], rel=1e-6)
    # Six of eight pairs of the first step, as two of all are ties.
    ties = sum(record["preference_loss"] * record["num_pairs"] for record in mine.records)
    assert ties == pytest.approx(2.0 * 2 * (32 - 2))


def test_the_scores_of_the_pairs_reach_the_function(tmp_path, policy, pairs):
    custom = {"objective": "python", "design": "none", "epochs": 1}
    custom["python"] = {"function": "rebel", "settings": {"beta": 1.0, "scale": 3.0}}
    code = ROOT / "examples/objective.py"
    records = train(tmp_path / "store", policy, [pairs], code=code, **custom).records
    # At the start π is π_ref, and the scores of a pair are 1 and 0. No tie is in this batch.
    assert records[0]["preference_loss"] == pytest.approx(3.0**2)
    assert records[-1]["preference_loss"] < records[0]["preference_loss"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return chosen.logp", r"returned tensor\(.*: not terms"),
        ("return {}", r"returned \{\}: not terms"),
        ("return {'los': chosen.logp}", r"returned \{'los': tensor.*: not terms"),
        ("return {'loss': chosen.logp.mean()}", r"returned loss = .*: not one value for each of 4"),
        ("return {'bonus': 1.0}", "returned bonus = 1.0: not one value"),
        ("return {'bonus': rejected.logp.detach()}", "returned bonus without a gradient"),
        ("return {'loss': chosen.no_such}", r"AttributeError.* \(line 2 of objective\.py\)"),
    ],
)
def test_a_function_that_cannot_work_gets_an_explanation(tmp_path, body, said):
    code = written(tmp_path, f"def objective(chosen, rejected):\n    {body}\n")
    with pytest.raises(UserError, match=said) as refused:
        UserObjective(code, "objective")(made_up(0), made_up(1))
    assert refused.value.remedy


def test_the_example_is_the_paper_s_equation():
    """The test that docs/research.md shows, on more pairs."""

    def side(logratios):
        logp = torch.tensor(logratios, dtype=torch.float64)[:, None]
        return ResponseLogps(logp - 30, torch.full_like(logp, -30), torch.ones_like(logp).bool())

    chosen, rejected = np.array([0.5, -1.0, 3.0, -40.0]), np.array([-0.25, 2.0, 2.5, 1.0])
    link = (np.exp(chosen) + chosen) - (np.exp(rejected) + rejected)
    margin = np.clip(0.5 * link, -20, 20)
    losses = chi_po(side(chosen), side(rejected), beta=0.5)["loss"]
    np.testing.assert_allclose(losses, np.log1p(np.exp(-margin)), rtol=1e-12)
    huge = chi_po(side([1000.0]), side([-1000.0]))["loss"]
    assert huge.isfinite().all()
