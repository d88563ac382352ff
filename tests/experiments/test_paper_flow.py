"""`geb paper` at a tiny scale, as a person runs it."""

import json
from pathlib import Path

import pytest
import yaml

from tests.flows.loop import ROOT, SMALL, geb_ok

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]

HEAD = "experiment,setting,method,divergence,configuration,fields,grid,tuning_seeds,seeds"
ROWS = (
    "main,front desk,f-DPO,KL,tiny,train.design=none,,,0",
    'main,front desk,GEB-π,KL,tiny,,"train.kappa=0.5,1",0,0',
)


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """Configurations of which a tiny one is the only preset, and a table of two cells."""
    folder = tmp_path / "configs"
    (folder / "paper/cells").mkdir(parents=True)
    values = {**SMALL, "extends": str(ROOT / "configs/quickstart.yaml"), "name": "tiny"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    (folder / "paper/cells/small.csv").write_text("\n".join([HEAD, *ROWS]) + "\n")
    published = (ROOT / "configs/paper/cells/published.csv").read_text()
    (folder / "paper/cells/published.csv").write_text(published)
    return folder


def test_cells_share_steps_and_are_found_again(configs: Path, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "results"
    arguments = ("paper", "--store", store, "--json", "--out", out)
    done = geb_ok(*arguments, GEB_CONFIGS=str(configs))
    found = json.loads(done.stdout)
    # GEB's reported run is one of the two that chose its κ: the seeds are the same here.
    assert {each["run"]: each["tunes"] for each in found["runs"]}.keys() == {
        "paper-tiny-design_none-s0",
        "paper-tiny-kappa_0.5-s0",
        "paper-tiny-kappa_1-s0",
    }
    made = {path.parent.name: len(list(path.parent.iterdir())) for path in folders(store)}
    assert (made["sft"], made["prepare"], made["pair"], made["train"]) == (1, 1, 1, 3)
    assert "### front desk" in (out / "report.md").read_text()
    assert Path(found["page"]).exists()
    again = geb_ok(*arguments, GEB_CONFIGS=str(configs))
    assert "✓" not in again.stderr, "no run is started for what the store has"
    assert json.loads(again.stdout)["runs"] == found["runs"]


def folders(store: Path) -> list[Path]:
    return [path for path in (store / "artifacts").glob("*/*") if path.is_dir()]


def test_a_run_whose_keys_have_changed_is_computed_again(configs: Path, tmp_path: Path) -> None:
    arguments = ("paper", "--store", tmp_path / "store", "--json", "--only", "f-DPO")
    rewards = []
    for factor in (1, 3):
        values = yaml.safe_load((configs / "tiny.yaml").read_text())
        values["sft"] = {**values.get("sft", {}), "learning_rate": factor * 1e-3}
        (configs / "tiny.yaml").write_text(yaml.safe_dump(values))
        done = geb_ok(*arguments, GEB_CONFIGS=str(configs))
        [run] = json.loads(done.stdout)["runs"]
        rewards.append(run["figures"])
    assert rewards[0] != rewards[1]
