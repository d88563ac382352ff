"""Kill the orchestrator, or the stage, in each stage; resume; the end is the undisturbed run's."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flows.loop import (
    geb,
    kill_stage,
    result_digests,
    stage_processes,
    started,
    steps,
    wait_for_line,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Where to strike: the step, and what its output says when it is at work. The warm start has a test
# of its own: it runs beside `prepare`, so that neither always comes first.
STRIKES = [
    ("prepare", "rows"),
    ("iteration-1/generate/0", "responses"),
    ("iteration-1/score/0", "started"),
    ("iteration-1/pair", "started"),
    ("iteration-1/train", "steps"),
    ("iteration-1/evaluate", "started"),
    ("iteration-1/promote", "started"),
]

Kill = Callable[[subprocess.Popen[str], Path, str], None]


def kill_orchestrator(process: subprocess.Popen[str], store: Path, step: str) -> None:
    """SIGKILL; the stage must end by itself, and the record still says that it runs."""
    pids = [each.pid for each in stage_processes(process)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for pid in pids:
        # Returns when a process that is not our child is gone; the test's time limit bounds it.
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], check=True)
    assert steps(store)[step]["state"] == "running", "the strike came too late"


def kill_the_stage(process: subprocess.Popen[str], store: Path, step: str) -> None:
    """SIGKILL of the stage; the run fails and names the signal."""
    kill_stage(process)
    output, _ = process.communicate()
    assert process.returncode == 1, output
    assert "SIGKILL" in output
    assert steps(store)[step]["state"] == "failed"


@pytest.mark.parametrize("kill", [kill_orchestrator, kill_the_stage])
def test_a_kill_in_each_stage(finished: Path, tmp_path: Path, kill: Kill) -> None:
    undisturbed = finished.parent / "store"
    sft = steps(undisturbed)["sft"]
    checkpoint = undisturbed / "artifacts/sft" / sft["key"] / "checkpoint"
    config = write_config(tmp_path, inputs={"policy": str(checkpoint), "warm_start": None})
    store = tmp_path / "store"
    command: list[str | Path] = ["run", config]
    done_before: set[str] = set()
    for step, sign in STRIKES:
        with started(*command) as process:
            wait_for_line(process, f"{step}:", sign)
            kill(process, store, step)
        records = steps(store)
        assert {name for name in done_before if records[name]["state"] != "reused"} == set()
        done_before = {
            name for name, each in records.items() if each["state"] in ("done", "reused")
        }
        command = ["resume", "small", "--store", store]
    last = geb(*command)
    assert last.returncode == 0, last.stdout + last.stderr
    expected = result_digests(undisturbed)
    del expected["sft"]
    assert result_digests(store) == expected


@pytest.mark.parametrize("kill", [kill_orchestrator, kill_the_stage])
def test_a_kill_in_the_warm_start(finished: Path, tmp_path: Path, kill: Kill) -> None:
    with started("run", write_config(tmp_path)) as process:
        wait_for_line(process, "sft:", "steps")
        kill(process, tmp_path / "store", "sft")
    last = geb("resume", "small", "--store", tmp_path / "store")
    assert last.returncode == 0, last.stdout + last.stderr
    assert result_digests(tmp_path / "store") == result_digests(finished.parent / "store")


def test_a_killed_stage_is_tried_again_within_the_run(finished: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, execution={"retries": 1, "retry_delay_seconds": 0})
    with started("run", config) as process:
        wait_for_line(process, "iteration-1/train:", "steps")
        kill_stage(process)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "SIGKILL" in output
    store = tmp_path / "store"
    assert result_digests(store) == result_digests(finished.parent / "store")
