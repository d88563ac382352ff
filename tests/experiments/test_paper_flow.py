"""`geb paper` at a tiny scale, as a person runs it."""

import json
from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest
import yaml

from tests.experiments.test_paper_cells import HEAD
from tests.flows.loop import ROOT, SMALL, geb_ok, steps

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]

# Tells almost any two responses apart.
ORACLE = """
def score(prompts, responses, references):
    return [len(set(each)) / 26 for each in responses]
"""
ROWS = (
    "main,front desk,f-DPO,KL,tiny,train.design=none,,100",
    'main,front desk,GEB-π,KL,tiny,,"train.kappa=0.5,1",0',
)


@pytest.fixture
def configs(tmp_path):
    """Configurations of which a tiny one is the only preset, and a table of two rows."""
    folder = tmp_path / "configs"
    (folder / "paper/cells").mkdir(parents=True)
    (folder / "letters.py").write_text(ORACLE)
    values = {**SMALL, "extends": str(ROOT / "configs/quickstart.yaml"), "name": "tiny"}
    values |= {"iterations": 2, "inputs": {"oracle_code": "letters.py"}}
    # So unlearnt a policy gives whole answers a probability, and a bonus, of zero.
    values["train"] = {"checkpoint_every_steps": 1, "learning_rate": 5e-3, "probability": "token"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    (folder / "paper/cells/small.csv").write_text("\n".join([HEAD, *ROWS]) + "\n")
    published = (ROOT / "configs/paper/cells/published.csv").read_text()
    (folder / "paper/cells/published.csv").write_text(published)
    return folder


def test_rows_share_steps_and_are_found_again(configs, tmp_path):
    store = tmp_path / "store"
    arguments = ("paper", "--set", f"store={store}", "--json")
    done = geb_ok(*arguments, GEB_CONFIGS=str(configs))
    document = json.loads(done.stdout)
    assert {run["run"] for run in document["tuning"]} == {
        "paper-tiny-kappa_0.5-s100",
        "paper-tiny-kappa_1-s100",
    }
    counts = {path.parent.name: len(list(path.parent.iterdir())) for path in folders(store)}
    # Runs of one seed share the policy and the first iteration's pairs.
    assert (counts["sft"], counts["prepare"], counts["pair"], counts["train"]) == (2, 2, 6, 8)
    check_by_hand(store, document)
    assert "## front desk: main" in Path(document["page"]).read_text()
    again = geb_ok(*arguments, GEB_CONFIGS=str(configs))
    assert "✓" not in again.stderr, "no run is started for what the store has"
    assert json.loads(again.stdout)["reported"] == document["reported"]


def check_by_hand(store, document):
    """Compares the rows with what the runs' stored scores and responses give."""
    kappas = {kappa: f"paper-tiny-kappa_{kappa}-s100" for kappa in ("0.5", "1")}
    means = {kappa: fmean(chain(*rewards(store, run).values())) for kappa, run in kappas.items()}
    assert means["0.5"] != means["1"]
    best = max(means, key=means.__getitem__)
    coefficients = {run["run"]: run["coefficient"] for run in document["reported"]}
    reported = f"paper-tiny-kappa_{best}-s0"
    assert coefficients[reported] == {"train.kappa": float(best)}
    [table] = document["tables"]
    assert table["title"] == "front desk: main"
    runs = {"f-DPO": "paper-tiny-design_none-s100", "GEB-π": reported}
    assert [row["method"] for row in table["rows"]] == list(runs)
    for row in table["rows"]:
        policy = rewards(store, runs[row["method"]])
        base = rewards(store, runs[row["method"]], "base/score/0")
        won = fmean(sum(policy[prompt]) > sum(base[prompt]) for prompt in base)
        assert row["WR"].split()[0] == f"{won:.2%}"
        assert row["AvgR"].split()[0] == f"{fmean(chain(*policy.values())):.4f}"


def rewards(store, run, step="iteration-2/evaluate/score/0"):
    """The stored scores of a step by prompt."""
    scores = defaultdict(list)
    for row in rows_of(store, run, step, "scores"):
        scores[row["prompt_id"]].append(row["score"])
    return scores


def rows_of(store, run, step, table):
    """Rows of a table in the artifact of a run's step."""
    record = steps(store, run)[step]
    place = store / "artifacts" / record["stage"] / record["key"]
    return pq.read_table(place / f"{table}.parquet").to_pylist()


def folders(store):
    return [path for path in (store / "artifacts").glob("*/*") if path.is_dir()]


def test_a_run_whose_keys_have_changed_is_computed_again(configs, tmp_path):
    arguments = ("paper", "--set", f"store={tmp_path / 'store'}", "--json", "--only", "f-DPO")
    rewards = []
    for factor in (1, 3):
        values = yaml.safe_load((configs / "tiny.yaml").read_text())
        values["sft"] = {**values.get("sft", {}), "learning_rate": factor * 1e-3}
        (configs / "tiny.yaml").write_text(yaml.safe_dump(values))
        done = geb_ok(*arguments, GEB_CONFIGS=str(configs))
        [run] = json.loads(done.stdout)["reported"]
        rewards.append(run["figures"])
    assert rewards[0] != rewards[1]
