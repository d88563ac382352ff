"""`geb bandit` as a person types it, at a size for a test."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.flows.loop import ROOT, geb, geb_refused

CONFIG = ROOT / "configs/bandit.yaml"
SMALL = (
    "bandit.num_iterations=30",
    "bandit.num_seeds=2",
    "bandit.kappas=[1.0]",
    "bandit.methods=[none, one_minus_pi]",
    "bandit.divergences=[reverse_kl]",
    "bandit.landscape={num_arms: 80, reference_arm: 20, best_arm: 60, reward_width: 6.0}",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bandit")


def small(place: Path, *more: str | Path) -> subprocess.CompletedProcess[str]:
    settings = [word for each in (*SMALL, f"store={place / 'store'}") for word in ("--set", each)]
    return geb("bandit", CONFIG, *settings, *more)


@pytest.fixture(scope="module")
def first(prefect_server: str, place: Path) -> subprocess.CompletedProcess[str]:
    return small(place, "--out", place / "out")


def test_prints_the_table_and_leaves_the_figures(
    place: Path, first: subprocess.CompletedProcess[str]
) -> None:
    assert first.returncode == 0, first.stdout + first.stderr
    table = (place / "out" / "table.md").read_text()
    assert table in first.stdout
    assert "| reverse KL | GEB 1+α−π | 1 |" in table
    for figure in ("reference.png", "policies.png"):
        assert (place / "out" / figure).read_bytes().startswith(b"\x89PNG")


def test_runs_once_only(place: Path, first: subprocess.CompletedProcess[str]) -> None:
    again = small(place, "--json")
    assert again.returncode == 0, again.stderr
    assert "cached" in again.stderr
    found = json.loads(again.stdout)
    assert [cell["method"] for cell in found["cells"]] == ["none", "one_minus_pi"]
    assert found["table"] == (place / "out" / "table.md").read_text()


def test_a_wrong_setting_is_named() -> None:
    said = geb_refused("bandit", CONFIG, "--set", "bandit.kapas=[1.0]")
    assert "bandit.kapas: no such setting; did you mean 'kappas'?" in said
