"""An interrupt of a sweep with several runs at a time stops them all."""

import os
import signal

import pytest

from tests.flows.loop import geb_json, started, wait_for_line, write_config

# Else the command starts a server on the database of the user who runs the tests.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]

RUNS = {"two-s0", "two-s1"}


def test_ctrl_c_stops_all_runs_of_a_sweep(tmp_path):
    config = write_config(tmp_path)
    two = ("--seeds", "0,1", "--parallel-runs", "2", "--name", "two")
    with started("sweep", config, *two, in_foreground=True) as process:
        begun = set()
        while begun < RUNS:
            line = wait_for_line(process, "prepare")
            begun |= {run for run in RUNS if run in line}
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    done = geb_json("status", "--store", tmp_path / "store")
    assert {done[run]["state"] for run in RUNS} == {"stopped"}, done
