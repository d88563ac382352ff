"""The rehearsal of the paper's table: the presets, with models and data of a hub on loopback."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from subprocess import run

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from benchmarks.rehearsal import TITLE
from benchmarks.rehearsal_server import serve
from experiments.paper.tables import paper_rows, published
from tests.flows.loop import ROOT


def test_the_hub_serves_repositories(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("models/owner/one/config.json", "datasets/owner/two/data/rows.jsonl"):
        place = tmp_path / "hub" / name
        place.parent.mkdir(parents=True)
        place.write_text(name)
    with serve(tmp_path / "hub") as address:
        api = HfApi(endpoint=address)
        commit = api.model_info("owner/one").sha
        assert commit == api.dataset_info("owner/two").sha
        cache = {"cache_dir": tmp_path / "cache", "endpoint": address, "revision": commit}
        snapshot = snapshot_download("owner/one", **cache)
        assert (Path(snapshot) / "config.json").read_text() == "models/owner/one/config.json"
        rows = hf_hub_download("owner/two", "data/rows.jsonl", repo_type="dataset", **cache)
        assert Path(rows).read_text() == "datasets/owner/two/data/rows.jsonl"


@pytest.mark.slow
@pytest.mark.release
def test_its_models_and_data_are_made_alike_each_time(tmp_path):
    for name in ("one", "two"):
        run([sys.executable, ROOT / "data/rehearsal/make.py", tmp_path / name], check=True)
    one, two = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("one", "two")
    )
    assert one == two
    assert {str(path.parent) for path in one} >= {
        "models/RLHFlow/LLaMA3-SFT",
        "models/mistralai/Mistral-7B-Instruct-v0.3",
        "models/Qwen/Qwen2.5-7B",
        "models/LxzGordon/URM-LLaMa-3.1-8B",
    }


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(7200)
def test_every_row_and_published_figure_is_in_a_table(tmp_path):
    rehearse = [sys.executable, "-m", "benchmarks.rehearsal", "--json", "--store", tmp_path]
    done = run(rehearse, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["failed"] == {}
    assert document["title"] == TITLE
    expected = defaultdict(list)
    for row in paper_rows("full"):
        if row.seeds:
            expected[f"{row.setting}: {row.experiment}"].append((row.method, row.divergence))
    shown = {
        table["title"]: {(row["method"], row["divergence"]): row for row in table["rows"]}
        for table in document["tables"]
    }
    assert {title: list(rows) for title, rows in shown.items()} == expected
    for experiment, setting, method, divergence, column in published():
        cell = shown[f"{setting}: {experiment}"][method, divergence][column]
        assert not cell.startswith("–"), (setting, experiment, method, divergence, column)
    drawn = {path.stem for path in Path(document["page"]).parent.glob("*.png")}
    curves = {
        f"kappa-{row.setting}-{row.divergence}".replace(" ", "-").lower()
        for row in paper_rows("full")
        if row.experiment == "kappa"
    }
    assert drawn == curves
