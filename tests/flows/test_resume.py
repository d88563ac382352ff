"""Kill the orchestrator, or the stage, in each stage; resume; the end is the undisturbed run's."""

import os
import signal

import pytest

from tests.flows.loop import (
    geb,
    geb_json,
    geb_ok,
    geb_refused,
    kill_stage,
    result_digests,
    stage_processes,
    started,
    steps,
    wait_for_line,
    warm_started,
    write_config,
)
from tests.flows.probes import gone

pytestmark = pytest.mark.slow

# Stages that are started, not forked: forks of short ones end before a strike reaches them.
STARTED = {"fork_server": False}
# Where to strike: the step, and what its output says when it is at work. The warm start runs at the
# same time as `prepare`, so that neither always comes first.
STRIKES = [
    ("prepare", "rows"),
    ("iteration-1/generate/0", "responses"),
    ("iteration-1/score/0", "started"),
    ("iteration-1/pair", "started"),
    ("iteration-1/train", "steps"),
    ("iteration-1/evaluate", "started"),
    ("iteration-1/promote", "started"),
]

# A training of many steps, one pair at a time, with checkpoints as often as they are by default.
MANY_STEPS = {
    "epochs": 4,
    "checkpoint_every_steps": None,
    "micro_batch_tokens": 1,
    "global_batch_pairs": 4,
}


def kill_orchestrator(process, store, step):
    """SIGKILL; the stage must end by itself, and the status says that it crashed."""
    # It starts no other stage while its stages are looked for.
    os.kill(process.pid, signal.SIGSTOP)
    pids = [stage.pid for stage in stage_processes(process)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert all(gone(pid) for pid in pids)
    assert steps(store)[step]["state"] == "crashed", "the strike came too late"


def test_the_orchestrator_is_killed_in_each_stage(finished, tmp_path):
    undisturbed = finished.parent / "store"
    config = write_config(tmp_path, inputs=warm_started(finished), execution=STARTED)
    store = tmp_path / "store"
    command = ["run", config]
    done_before = set()
    for step, sign in STRIKES:
        with started(*command) as process:
            wait_for_line(process, f"{step}:", sign)
            kill_orchestrator(process, store, step)
        records = steps(store)
        assert {name for name in done_before if records[name]["state"] != "reused"} == set()
        done_before = {
            name for name, record in records.items() if record["state"] in ("done", "reused")
        }
        command = ["resume", "small", "--store", store]
    geb_ok(*command)
    assert result_digests(store) == result_digests(undisturbed, without="sft")


def test_a_training_saves_its_step_when_its_orchestrator_is_killed(finished, tmp_path):
    changes = {"inputs": warm_started(finished), "train": MANY_STEPS}
    peaceful, killed = tmp_path / "peaceful", tmp_path / "killed"
    for run in (peaceful, killed):
        run.mkdir()
    assert geb("run", write_config(peaceful, **changes)).returncode == 0
    with started("run", write_config(killed, **changes)) as process:
        # The loss is shown once a step is done.
        wait_for_line(process, "iteration-1/train:", "loss")
    with started("resume", "small", "--store", killed / "store") as process:
        wait_for_line(process, "going on after step")
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert result_digests(killed / "store") == result_digests(peaceful / "store")


def test_each_stage_is_killed_and_tried_again_within_the_run(finished, tmp_path):
    execution = STARTED | {"retries": 1}
    config = write_config(tmp_path, inputs=warm_started(finished), execution=execution)
    with started("run", config) as process:
        for step, sign in STRIKES:
            wait_for_line(process, f"{step}:", sign)
            kill_stage(process)
            wait_for_line(process, "SIGKILL")
        output, _ = process.communicate()
    assert process.returncode == 0, output
    expected = result_digests(finished.parent / "store", without="sft")
    assert result_digests(tmp_path / "store") == expected


def test_a_killed_stage_fails_a_run_without_retries(finished, tmp_path):
    store = tmp_path / "store"
    with started("run", write_config(tmp_path)) as process:
        wait_for_line(process, "sft:", "steps")
        kill_stage(process)
        output, _ = process.communicate()
    assert process.returncode == 1, output
    assert "SIGKILL" in output
    assert steps(store)["sft"]["state"] == "failed"
    shown = geb("report", "small", "--store", store).stdout
    assert "The run is not complete (failed): " in shown
    assert f"`geb resume small --store {store}`" in shown
    assert "failed: sft" in (store / "runs/small/report.html").read_text()


def test_a_report_leaves_out_results_of_other_settings(copied):
    store = copied.parent / "store"
    with started("run", copied, "--set", "train.epochs=300") as process:
        wait_for_line(process, "iteration-1/train:", "loss")
        refused = geb_refused("run", copied, "--set", "train.kappa=3")
        assert f"run small is at work (pid {process.pid})" in refused
    shown = geb_json("report", "small", "--store", store)
    assert "iteration-1/pair" in shown["artifacts"]
    assert shown["checkpoint"] is None
    assert not {"loss", "mean_reward", "kappa"} & shown["rows"][1]["figures"].keys()
    geb_ok("run", copied)
    assert "mean_reward" in geb_json("report", "small", "--store", store)["rows"][1]["figures"]
