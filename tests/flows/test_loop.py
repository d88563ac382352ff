"""The loop at small size against a real Prefect server: results, caching, keys, two at once."""

import json
import shutil
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.sorting import FlowRunSort

from stages.tables.parts import Part
from stages.tables.schemas import SCORES
from tests.flows.loop import ROOT, geb_ok, plan, started, steps, wait_for_line, write_config
from tests.programs import run_program


def test_a_run_ends_with_its_table_and_says_where_things_are(finished):
    done = geb_ok("report", "small", "--store", finished.parent / "store")
    header = next(line for line in done.stdout.splitlines() if "distinct-1" in line)
    for column in ("win rate", "distinct-1", "repetition", "log π_ref", "ties", "bonus ratio"):
        assert column in header
    places = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if "/store/" in line)
    page = Path(places["report"]).read_text()
    assert page.startswith("<!doctype html>")
    assert "κ 1 · β" in page
    assert (Path(places["checkpoint"]) / "model.safetensors").exists()
    assert "small@production is version 1" in done.stdout


PROMOTE = "iteration-1/promote"


def test_a_run_that_is_complete_is_shown_again_without_prefect(finished, prefect_server):
    before = steps(finished.parent / "store")
    (finished.parent / "store/runs/small/report.html").unlink()
    with SyncPrefectClient(prefect_server) as client:
        flow_runs = len(client.read_flow_runs())
        done = geb_ok("run", finished)
        assert len(client.read_flow_runs()) == flow_runs
    assert "small@production is version 1" in done.stdout
    assert steps(finished.parent / "store") == before
    page = (finished.parent / "store/runs/small/report.html").read_text()
    assert page.count("<svg") == 1, "mean reward: other figures have one iteration"
    data = httpx.get(f"{prefect_server}/artifacts/small-report/latest").json()["data"]
    assert data.count("](data:image/png;base64,") == page.count("<svg")
    assert data.index("| win rate |") < data.index("![Mean reward")


def test_prefect_shows_another_run_s_steps_as_cached(copied, prefect_server):
    before = steps(copied.parent / "store")
    geb_ok("run", copied, "--set", "name=second")
    after = steps(copied.parent / "store", "second")
    # Its checkpoints are registered under its own name.
    assert [name for name, step in after.items() if step["state"] != "reused"] == [PROMOTE]
    assert [name for name in before if after[name]["key"] != before[name]["key"]] == [PROMOTE]
    with SyncPrefectClient(prefect_server) as client:
        [flow_run] = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
        runs = client.read_task_runs()
    assert flow_run.state.is_completed()
    states = {run.name: run.state_name for run in runs if run.flow_run_id == flow_run.id}
    assert states == dict.fromkeys(before, "Cached") | {PROMOTE: "Completed"}


@pytest.mark.parametrize(
    ("change", "first_step", "why"),
    [
        ("seed=1", "prepare", "seed"),
        (f"inputs.prompts=[{ROOT}/data/chat/prompts.jsonl]", "prepare", "input train"),
        # Evaluation samples at another temperature.
        ("generate.temperature=0.9", "iteration-1/generate/0", "params.temperature 1.0 → 0.9"),
        ("train.kappa=0.5", "iteration-1/train", "params.kappa 1.0 → 0.5"),
        ("pair.ties=drop", "iteration-1/pair", "params.ties 'keep' → 'drop'"),
        ("evaluation.num_samples=3", "base/generate/0", "params.num_samples 2 → 3"),
    ],
)
def test_what_changes_the_result_is_computed_again_and_all_after_it(
    finished, change, first_step, why
):
    lines = plan(finished, "--set", change)
    changed = [name for name, line in lines.items() if line["action"] == "run"]
    assert changed[0] == first_step
    assert why in lines[first_step]["because"]
    assert changed[-1] == "iteration-1/promote"


def test_what_changes_only_speed_or_place_does_not_change_the_key(finished):
    changes = (
        "train.micro_batch_tokens=7",
        "tracking.report_to=[tensorboard]",
        "execution.retries=5",
        "execution.parallel=4",
        "resources.train={processes: 2}",
        "promote.aliases=[production]",
    )
    lines = plan(finished, *(part for change in changes for part in ("--set", change)))
    assert {step["action"] for step in lines.values()} == {"reuse"}


@pytest.mark.slow
def test_two_at_once_both_finish_and_the_work_is_done_once(prefect_server, tmp_path):
    config = write_config(tmp_path, generate={"num_shards": 2})
    with started("run", config) as one, started("run", config) as two:
        outputs = [process.communicate()[0] for process in (one, two)]
        assert [one.returncode, two.returncode] == [0, 0], outputs
    records = steps(tmp_path / "store")
    assert {"iteration-1/generate/1", "iteration-1/score/1"} < set(records)
    for name, record in records.items():
        logs = tmp_path / "store/logs" / record["stage"] / record["key"]
        texts = [log.read_text() for log in logs.glob("*.log")]
        assert sum("another run has computed it" not in text for text in texts) == 1, name
    paired = records["iteration-1/pair"]
    artifact = tmp_path / "store/artifacts/pair" / paired["key"]
    assert json.loads((artifact / "metrics.json").read_text())["prompts"] == 48


def test_compute_again_on_purpose(copied):
    lines = plan(copied, "--from", "iteration-1/train")
    assert lines["iteration-1/pair"]["action"] == "reuse"
    assert lines["iteration-1/train"]["because"] == "asked to compute it again"
    store = copied.parent / "store"
    geb_ok("resume", "small", "--store", store, "--from", "iteration-1/train")
    states = {name: step["state"] for name, step in steps(store).items()}
    assert states["iteration-1/pair"] == "reused"
    assert states["iteration-1/train"] == "done"


def test_results_of_earlier_settings_are_not_computed_again(copied):
    lines = plan(copied, "--set", "train.kappa=2", "--from", "iteration-1/train")
    assert "again" not in {line["action"] for line in lines.values()}


def test_a_step_computed_again_reads_nothing_of_an_interrupted_one(copied):
    store = copied.parent / "store"
    key = steps(store)["iteration-1/score/0"]["key"]
    artifact = store / "artifacts/score" / key
    scores = pq.read_table(artifact / "scores.parquet")
    before = scores["score"].to_pylist()
    shutil.rmtree(artifact)
    work = store / "work/score" / key
    work.mkdir(parents=True)
    place = scores.schema.get_field_index("score")
    wrong = scores.set_column(place, scores.schema.field(place), [[7.0] * len(scores)])
    pq.write_table(wrong, Part(work, SCORES, 0, len(scores)).path)
    geb_ok("resume", "small", "--store", store, "--from", "iteration-1/score/0")
    assert pq.read_table(artifact / "scores.parquet")["score"].to_pylist() == before


# A signal whose exception is raised in a destructor or a callback, where Python only prints it.
LOSES_INTERRUPTS = """
import signal
from flows.commands.cli import main

install = signal.signal

def lossy(number, handler):
    def called(*arguments):
        try:
            handler(*arguments)
        except BaseException:
            pass
    return install(number, called if callable(handler) else handler)

signal.signal = lossy
main()
"""


@pytest.mark.slow
def test_interrupting_a_run_leaves_no_process_and_says_how_to_go_on(prefect_server, tmp_path):
    lossy = ("-c", LOSES_INTERRUPTS)
    with started("run", write_config(tmp_path), program=lossy) as process:
        wait_for_line(process, "sft:", "started")
        process.terminate()
        output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "geb resume" in output
    assert steps(tmp_path / "store")["sft"]["state"] == "stopped"
    assert run_program("pgrep", "-f", tmp_path).stdout == ""
