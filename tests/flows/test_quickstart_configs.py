import json
from pathlib import Path

import pytest

from flows.execution.plan import differences
from flows.pipeline.loading import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("preset", "differing"),
    [
        ("fdpo", ["design"]),
        ("ipo", ["design", "loss"]),
        ("rpo", ["design", "loss", "reward_scale"]),
        ("rebel", ["design", "loss"]),
        ("se-popo", ["design"]),
        ("copo", ["bonus_weight", "design"]),
    ],
)
def test_a_comparison_differs_in_its_objective_and_nothing_else(preset, differing):
    quickstart, other = (
        json.loads(load_config(CONFIGS / f"{name}.yaml").to_json())
        for name in ("quickstart", f"quickstart-{preset}")
    )
    lines = list(differences(quickstart, other))
    named = [line.partition(":")[0].split()[0] for line in lines]
    assert sorted(named) == ["name", *(f"train.{each}" for each in differing)], lines
