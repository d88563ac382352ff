"""Every shipped configuration is read and checked."""

import json
from pathlib import Path

import pytest

from flows.execution.plan import differences
from flows.pipeline.loading import load_config
from stages.contract.errors import UserError

ROOT = Path(__file__).parents[3]
# Parts and suites are not whole configurations, and `cluster` holds deployments.
_OTHERS = ("parts", "suites", "cluster")
SHIPPED = sorted(
    path
    for path in (ROOT / "configs").rglob("*.yaml")
    if not set(path.relative_to(ROOT / "configs").parts) & set(_OTHERS)
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid(path):
    loaded = load_config(path)
    assert loaded.name == path.stem


@pytest.mark.parametrize(
    ("preset", "differing"),
    [
        ("fdpo", ["design"]),
        ("ipo", ["design", "loss"]),
        ("se-popo", ["design"]),
    ],
)
def test_a_comparison_differs_in_its_objective_and_nothing_else(preset, differing):
    quickstart, other = (
        json.loads(load_config(ROOT / f"configs/{name}.yaml").to_json())
        for name in ("quickstart", f"quickstart-{preset}")
    )
    lines = list(differences(quickstart, other))
    named = [line.partition(":")[0].split()[0] for line in lines]
    assert sorted(named) == ["name", *(f"train.{field}" for field in differing)], lines


def test_later_files_and_settings_win(tmp_path):
    first = "seed: 1\ntrain: {beta: 0.2, kappa: 3}\nsuites: {own: {prompts: own.jsonl}}\n"
    (tmp_path / "a.yaml").write_text(first)
    second = "extends: a.yaml\nname: b\ntrain: {kappa: 2}\nsuites: {}\n"
    (tmp_path / "b.yaml").write_text(second)
    config = load_config(tmp_path / "b.yaml", ["train.kappa=1e-3"])
    assert (config.seed, config.train.beta, config.train.kappa) == (1, 0.2, 1e-3)
    assert config.suites == {}, "an empty table empties the one it extends"


def test_what_two_files_share_undoes_neither(tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 1\ntrain: {beta: 0.2, kappa: 3}\n")
    (tmp_path / "a.yaml").write_text("extends: base.yaml\ntrain: {kappa: 2}\n")
    (tmp_path / "b.yaml").write_text("extends: base.yaml\nseed: 5\n")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml, b.yaml]\nname: c\n")
    config = load_config(tmp_path / "c.yaml")
    assert (config.seed, config.train.beta, config.train.kappa) == (5, 0.2, 2)


def test_a_text_that_a_comment_would_cut_is_refused():
    with pytest.raises(UserError, match="a comment begins"):
        load_config(SHIPPED[0], ["generate.system_prompt=Write a # first"])
    quoted = load_config(SHIPPED[0], ["generate.system_prompt='Write a # first'"])
    assert quoted.generate.system_prompt == "Write a # first"
