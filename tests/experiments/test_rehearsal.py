"""The rehearsal of the paper's experiments: the presets, with models and data of a local hub."""

import csv
import json
import sys
from subprocess import run

import pytest

from benchmarks.rehearsal import NAME, presets
from tests.flows.loop import ROOT

# Where a comparison has the figure of a column of the paper's tables: its evaluation and its name.
COLUMNS = {
    "WR": ("held-out prompts", "win_rate"),
    "AvgR": ("held-out prompts", "mean_reward"),
    "Math": ("math500", "accuracy"),
    "pass@16": ("held-out prompts", "pass@16"),
    "math500 pass@16": ("math500", "pass@16"),
    "olympiadbench pass@16": ("olympiadbench", "pass@16"),
    "aime2025 pass@16": ("aime2025", "pass@16"),
}
MODELS = {"LLaMA-3-8B-SFT": "llama3", "Mistral-7B-Instruct-v0.3": "mistral", "Qwen2.5-7B": "math"}
METHODS = {"f-DPO": "fdpo", "GEB-π": "geb-p", "GEB-1/π": "geb-inverse"}
DIVERGENCES = {"KL": "kl", "Hellinger": "hellinger", "forward KL": "fkl"}


def preset_of(setting, method, divergence):
    """The experiment of a row of the paper's tables."""
    model = MODELS[setting]
    name = f"{model}-{METHODS.get(method, method.lower())}"
    return name if model == "math" else f"{name}-{DIVERGENCES[divergence]}"


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(7200)
def test_every_preset_runs_and_has_the_published_figures(tmp_path):
    rehearse = [sys.executable, "-m", "benchmarks.rehearsal", "--json", "--store", tmp_path]
    done = run(rehearse, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert set(figures) == {f"{NAME}-{preset}-s0" for preset in presets()}
    with (ROOT / "results/published.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            preset = preset_of(row["setting"], row["method"], row["divergence"])
            evaluation, figure = COLUMNS[row["figure"]]
            assert figure in figures[f"{NAME}-{preset}-s0"][evaluation]["figures"], row
