"""Every shipped configuration is read and checked; presets say what the paper says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flows.bandit import BanditConfig
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config, load_settings
from stages.contract.errors import UserError

ROOT = Path(__file__).parents[2]
# Parts are no whole configurations, and `cluster` holds deployments.
_OTHERS = ("parts", "cluster")
SHIPPED = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in _OTHERS
)
MATH = sorted((ROOT / "configs/paper").glob("math-*.yaml"))
PAPER = sorted(set((ROOT / "configs/paper").glob("*.yaml")) - set(MATH))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid(path: Path) -> None:
    schema = BanditConfig if path.stem.startswith("bandit") else RunConfig
    loaded = load_settings(path, (), schema)
    assert loaded.name == path.stem


def test_the_paper_s_experiments_are_complete() -> None:
    names = {path.stem for path in PAPER}
    assert names == {
        f"{model}-{method}-{divergence}"
        for model in ("llama3", "mistral")
        for method in ("fdpo", "geb-p", "geb-inverse", "geb-arctanh")
        for divergence in ("kl", "hellinger", "fkl")
    }


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_a_paper_configuration_does_what_its_name_says(path: Path) -> None:
    config = load_config(path)
    model, _, rest = path.stem.partition("-")
    method, _, divergence = rest.rpartition("-")
    assert (
        config.train.divergence
        == {
            "kl": "reverse_kl",
            "hellinger": "hellinger",
            "fkl": "forward_kl",
        }[divergence]
    )
    assert (
        config.train.design
        == {
            "fdpo": "none",
            "geb-p": "one_minus_pi",
            "geb-inverse": "inverse_pi",
            "geb-arctanh": "arctanh",
        }[method]
    )
    assert config.inputs.policy is not None
    assert model[:5].lower() in config.inputs.policy.lower()
    assert config.train.beta == 0.1
    assert config.train.global_batch_pairs == 256
    assert config.evaluation.num_samples == 64


def test_the_mathematics_experiments_are_those_of_the_paper() -> None:
    designs = {path.stem: load_config(path).train for path in MATH}
    assert {name: (train.design, train.kappa) for name, train in designs.items()} == {
        "math-fdpo": ("none", 0.0),
        "math-geb-p": ("one_minus_pi", 50),
        "math-geb-inverse": ("inverse_pi", 5e-2),
        "math-geb-arctanh": ("arctanh", 5e-6),
    }


@pytest.mark.parametrize("path", MATH, ids=lambda path: path.stem)
def test_a_mathematics_experiment_screens_verifies_and_pairs(path: Path) -> None:
    config = load_config(path)
    assert config.inputs.policy == "Qwen/Qwen2.5-7B"
    assert (config.screen.num_samples, config.screen.temperature) == (2, 0.6)
    assert (config.score.oracle, config.pair.ties) == ("math_verify", "drop")
    train = config.train
    assert (train.divergence, train.learning_rate, train.warmup_ratio) == ("reverse_kl", 5e-7, 0.1)
    assert train.target_ratio is None


def test_a_resolved_configuration_reads_back_as_it_was() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml")
    assert RunConfig.model_validate_json(config.to_json()) == config


def test_later_files_and_settings_win(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1\ntrain: {beta: 0.2, kappa: 3}\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\nname: b\ntrain: {kappa: 2}\n")
    config = load_config(tmp_path / "b.yaml", ["train.kappa=1e-3"])
    assert (config.seed, config.train.beta, config.train.kappa) == (1, 0.2, 1e-3)


def test_a_file_that_extends_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(UserError, match="extends itself"):
        load_config(tmp_path / "a.yaml")


def test_places_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "prompts.jsonl").write_text("{}")
    values = {"inputs": {"prompts": ["../prompts.jsonl"], "policy": "owner/model"}}
    (tmp_path / "deep/config.yaml").write_text(yaml.safe_dump(values))
    config = load_config(tmp_path / "deep/config.yaml")
    assert config.inputs.prompts == (str(tmp_path / "prompts.jsonl"),)
    assert config.inputs.policy == "owner/model"
