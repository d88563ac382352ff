"""`geb evaluate` and `geb sweep`, as a person runs them."""

import html
import json
import os
import shutil
import signal
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest

from flows.evaluate import resolve_comparison
from flows.execution.run_record import RunRecord
from flows.pipeline.inputs import ComparedModels
from flows.pipeline.loading import load_config
from stages.store.opening import open_store
from tests.flows.loop import (
    ROOT,
    geb,
    geb_json,
    geb_ok,
    geb_refused,
    started,
    wait_for_line,
    write_config,
)
from tests.flows.records import recorded


@pytest.fixture(scope="module")
def trained(finished, tmp_path_factory):
    """Configuration of a finished run whose store these tests may add to."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(finished.parent / "store", folder / "store", copy_function=shutil.copy2)
    return write_config(folder)


def test_evaluating_a_finished_run_reuses_its_steps(trained):
    # Another split would hold out prompts that the run has trained on.
    other = ("--set", "prepare.test_prompts=32", "--set", "prepare.system_prompt=red")
    done = geb_ok("evaluate", trained, "small@production", "--base", "small:1", *other, "--json")
    assert "policy/generate/0 cached" in " ".join(done.stderr.split())
    document = json.loads(done.stdout)
    assert document["policy"] == "small@production"
    policy = document["figures"]["policy"]
    assert policy["win_rate"]["value"] == 0, "a model does not win against itself"
    assert policy["tied_prompts"]["value"] == 16
    assert document["differences"] == []
    assert (
        document["verdict"] == "By mean reward against small:1, small@production: no difference is "
        "shown, no shared prompt has other rewards."
    )
    kept = geb("gc", "--store", trained.parent / "store", "--json")
    assert document["artifact"] not in kept.stdout


def test_a_checkpoint_is_evaluated_on_other_prompts(trained, tmp_path):
    lines = (ROOT / "data/quickstart/prompts.jsonl").read_text().splitlines()[:4]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    checkpoint = geb_json("report", "small", "--store", trained.parent / "store")["checkpoint"]
    others = ("--set", f"inputs.test_prompts={prompts}")
    # The oracle of a suite is not needed, nor tried.
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    suite = json.dumps({"score": {"oracle": "python"}, "oracle_code": str(broken)})
    others += ("--set", f"suites.more={suite}")
    done = geb_ok(*("evaluate", trained, checkpoint, "--base", "small:1", *others))
    assert "win rate" in done.stdout
    metrics = Path(done.stdout.split("metrics")[-1].split()[0]) / "metrics.json"
    assert json.loads(metrics.read_text())["compared_prompts"] == 4


def test_figures_of_policy_and_base_are_their_own(trained):
    [warm_start] = (trained.parent / "store/artifacts/sft").glob("*/checkpoint")
    done = geb_json("evaluate", trained, "small:1", "--base", warm_start)
    rows = pq.read_table(Path(done["artifact"]) / "prompts.parquet").to_pylist()
    means = {
        model: fmean(
            row["total"] / row["count"]
            for row in rows
            if (row["model"], row["figure"]) == (model, "mean_response_tokens")
        )
        for model in ("policy", "base")
    }
    assert means["policy"] != means["base"]
    for model, mean in means.items():
        assert done["figures"][model]["mean_response_tokens"]["value"] == pytest.approx(mean)


def test_held_out_prompts_are_from_the_training_of_the_checkpoint(trained):
    record = RunRecord(open_store(str(trained.parent / "store")), "small")
    first = record.step("prepare")
    # The run's name again with another seed: its split holds out other prompts.
    recorded(record, "prepare", stage="prepare", key="0" * 64)
    try:
        models = ComparedModels("small:1", "small:1")
        run = resolve_comparison(load_config(trained, []), models)
    finally:
        record.save_step(first)
    [prompts] = run.steps[0].inputs["prompts"]
    assert prompts.key == first.key


def test_a_model_is_not_compared_without_its_held_out_prompts(trained, tmp_path):
    prepared = trained.parent / "store/artifacts/prepare"
    moved = prepared.rename(tmp_path / "prepare")
    try:
        refused = geb_refused("evaluate", trained, "small:1", "--base", "small:1")
    finally:
        moved.rename(prepared)
    assert "the prompts that the training of small:1 held out" in refused
    assert "inputs.test_prompts" in refused


def test_a_broken_oracle_is_refused_before_models_are_sampled(trained, tmp_path):
    oracle = tmp_path / "oracle.py"
    oracle.write_text("def score(responses):\n    return 1\n")
    broken = ("--set", f"inputs.oracle_code={oracle}", "--set", "generate.top_p=0.5")
    refused = geb_refused("evaluate", trained, "small:1", "--base", "small:1", *broken)
    assert "the oracle was tried before the run" in refused


@pytest.mark.slow
def test_a_sweep_ends_with_a_row_for_each_combination(trained):
    grid = ["--grid", "train.kappa=0.5,1", "--seeds", "0", "--name", "try"]
    runs = {run["run"]: run for run in geb_json("sweep", trained, *grid, "--dry-run")}
    assert runs["try-train.kappa_1-s0"]["compute"] == 1, "all but promote is the finished run's"
    done = geb_ok("sweep", trained, *grid, "--json", "--parallel-runs", "2")
    document = json.loads(done.stdout)
    assert document["methods"] == {
        "try-train.kappa_0.5-s0": "train.kappa=0.5",
        "try-train.kappa_1-s0": "train.kappa=1",
    }
    page = Path(document["page"])
    assert page.is_relative_to(trained.parent / "store/runs/try")
    # Seeds are few, so that the runs are compared prompt by prompt; κ = 1 is the finished run's.
    text = page.read_text()
    assert document["verdict"] in html.unescape(text)
    last = geb_json("report", "small", "--store", trained.parent / "store")["rows"][-1]
    figures = document["figures"]["try-train.kappa_1-s0"]["held-out prompts"]["figures"]
    assert {"mean_reward", "win_rate", "tied_prompts", "pairs", "loss"} <= figures.keys()
    assert figures == last["figures"]
    listed = geb_json("status", "--store", trained.parent / "store")
    assert set(runs) <= set(listed)
    store = trained.parent / "store"
    models = geb_json("models", "--store", store)
    assert [models[run]["aliases"] for run in runs] == [{}, {}], "no run of a grid is production"


def test_a_sweep_goes_on_when_a_run_fails_and_names_it(trained, tmp_path):
    config = write_config(tmp_path, store=str(trained.parent / "store"))
    oracle = tmp_path / "broken.py"
    oracle.write_text("def score(responses):\n    return 1\n")
    grid = ["--grid", f"inputs.oracle_code={oracle},{ROOT / 'data/quickstart/oracle.py'}"]
    done = geb("sweep", config, *grid, "--name", "half")
    assert done.returncode == 1, done.stdout
    assert "1 of 2 runs failed" in done.stderr
    assert "the oracle was tried before the run" in done.stderr
    assert "half/comparison.html" in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_stops_all_runs_of_a_sweep(prefect_server, tmp_path):
    runs = {"two-s0", "two-s1"}
    two = ("--seeds", "0,1", "--parallel-runs", "2", "--name", "two")
    with started("sweep", write_config(tmp_path), *two, in_foreground=True) as process:
        begun = set()
        while begun < runs:
            line = wait_for_line(process, "prepare")
            begun |= {run for run in runs if run in line}
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    done = geb_json("status", "--store", tmp_path / "store")
    assert {done[run]["state"] for run in runs} == {"stopped"}, done
