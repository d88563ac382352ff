"""The stage as the flow calls it, at a size for a test."""

import json
from pathlib import Path

import pytest
from stage_calls import call_request, request_for

from stages.bandit.params import BanditParams, LandscapeParams
from stages.bandit.report import table
from stages.bandit.run import STAGE
from stages.contract.errors import UserError

SMALL = BanditParams(
    landscape=LandscapeParams(
        num_arms=100, reference_arm=25, reference_width=6.0, best_arm=75, reward_width=8.0
    ),
    kappas=(1.0,),
    num_seeds=3,
    num_iterations=40,
    record_every=20,
)


def test_makes_metrics_table_and_figures(tmp_path):
    artifact, events = call_request(STAGE, request_for(SMALL, {}, tmp_path / "store"))
    metrics = json.loads((artifact.path / "metrics.json").read_text())
    found = {(cell["method"], cell["divergence"]) for cell in metrics["cells"]}
    everywhere = ("none", "feb", "one_minus_pi", "inverse_pi", "arctanh")
    assert found == {
        *((m, d) for m in everywhere for d in ("reverse_kl", "hellinger", "forward_kl")),
        *((m, "reverse_kl") for m in ("selm", "xpo", "vpo", "se_popo")),
    }
    for cell in metrics["cells"]:
        assert len(cell["expected_reward_by_seed"]) == 3
        assert 0.0 <= cell["share_in_best_region"] <= 1.0
        assert cell["expected_reward_half_width"] >= 0.0
    rows = (artifact.path / "table.md").read_text().splitlines()
    assert len(rows) == 2 + len(metrics["cells"])
    assert {row.count("|") for row in rows} == {8}
    for figure in ("reference.png", "policies.png"):
        assert (artifact.path / figure).read_bytes().startswith(b"\x89PNG")
    assert any(event.type == "progress" and event.done == 40 for event in events)


def test_is_the_same_twice(tmp_path):
    digests = [
        call_request(STAGE, request_for(SMALL, {}, tmp_path / name))[0].manifest.digest()
        for name in ("one", "two")
    ]
    assert digests[0] == digests[1]


def test_nothing_to_run_is_the_users_mistake(tmp_path):
    params = SMALL.model_copy(update={"methods": ("xpo",), "divergences": ("hellinger",)})
    with pytest.raises(UserError, match="none of the methods"):
        call_request(STAGE, request_for(params, {}, tmp_path / "store"))


def test_the_published_table_is_that_of_the_published_numbers():
    folder = Path(__file__).parents[3] / "docs" / "bandit"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["num_seeds"] == 10
    assert (folder / "table.md").read_text() == table(metrics["cells"])
