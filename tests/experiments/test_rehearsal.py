"""The rehearsal of the paper's table: the presets, with models and data of a hub on loopback."""

import json
import sys
from pathlib import Path
from subprocess import run

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from benchmarks.rehearsal import TITLE
from benchmarks.rehearsal_server import serve
from tests.flows.loop import ROOT


def test_the_hub_serves_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_its_models_and_data_are_made_alike_each_time(tmp_path: Path) -> None:
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
def test_every_column_of_the_full_table_is_filled(tmp_path: Path) -> None:
    rehearse = [sys.executable, "-m", "benchmarks.rehearsal", "--json", "--store", tmp_path]
    done = run(rehearse, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["failed"] == {}
    assert document["title"] == TITLE
    for table in document["tables"]:
        for title in table["rows"][0]:
            empty = all(row[title].startswith("–") for row in table["rows"])
            assert not empty, (table["title"], title)
    drawn = {path.stem for path in Path(document["page"]).parent.glob("*.png")}
    assert any(name.startswith("kappa") for name in drawn)
