"""Kill the orchestrator, or the stage, in each stage; resume; the end is the undisturbed run's."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.flows.loop import (
    geb,
    result_digests,
    stage_processes,
    started,
    steps,
    wait_for_line,
    write_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Where to strike: the step, and what its output says when it is at work.
STRIKES = [
    ("prepare", "rows"),
    ("sft", "steps"),
    ("iteration-1/generate/0", "responses"),
    ("iteration-1/score/0", "started"),
    ("iteration-1/pair", "started"),
    ("iteration-1/train", "steps"),
    ("iteration-1/evaluate", "started"),
    ("iteration-1/promote", "started"),
]


def wait_until_gone(pids: list[int]) -> None:
    """Returns when processes of another parent are gone; the test's time limit bounds it."""
    for pid in pids:
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], check=True)


def test_killing_the_orchestrator_in_each_stage(finished: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    store = tmp_path / "store"
    command: list[str | Path] = ["run", config]
    done_before: set[str] = set()
    for step, sign in STRIKES:
        with started(*command) as process:
            wait_for_line(process, f"{step}:", sign)
            pids = [each.pid for each in stage_processes(process)]
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            wait_until_gone(pids)
        records = steps(store)
        assert records[step]["state"] == "running", "the strike came too late"
        assert {name for name in done_before if records[name]["state"] != "reused"} == set()
        done_before = {name for name, each in records.items() if each["state"] != "running"}
        command = ["resume", "small", "--store", store]
    last = geb(*command)
    assert last.returncode == 0, last.stdout + last.stderr
    assert result_digests(store) == result_digests(finished.parent / "store")


def test_killing_the_stage_in_each_stage(finished: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    store = tmp_path / "store"
    command: list[str | Path] = ["run", config]
    for step, sign in STRIKES:
        with started(*command) as process:
            wait_for_line(process, f"{step}:", sign)
            for stage in stage_processes(process):
                stage.kill()
            output, _ = process.communicate()
        assert process.returncode == 1, output
        assert "SIGKILL" in output
        records = steps(store)
        assert records[step]["state"] == "failed"
        command = ["resume", "small", "--store", store]
    last = geb(*command)
    assert last.returncode == 0, last.stdout + last.stderr
    assert result_digests(store) == result_digests(finished.parent / "store")


def test_a_killed_stage_is_tried_again_within_the_run(finished: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, execution={"retries": 1, "retry_delay_seconds": 0})
    with started("run", config) as process:
        wait_for_line(process, "iteration-1/train:", "steps")
        for stage in stage_processes(process):
            stage.kill()
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "goes on" in output or "resum" in output, "training did not go on from its checkpoint"
    store = tmp_path / "store"
    assert result_digests(store) == result_digests(finished.parent / "store")
