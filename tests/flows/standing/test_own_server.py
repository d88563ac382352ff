"""`geb run` where no Prefect server is configured: it brings one for its own time."""

import contextlib
import os
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml

from tests.flows import trivial_stages
from tests.flows.loop import started, steps, wait_for_line, write_config
from tests.flows.probes import gone

pytestmark = pytest.mark.slow

# In place of `python -m stages.train`: reports progress until the file exists, then does the work.
_WAITING_STAGE = """#!/bin/sh
case "$*" in *stages.train*)
    while [ ! -e {go} ]; do
        echo '{{"type": "progress", "done": 1, "total": 2, "unit": "steps"}}'
        sleep 0.1
    done
esac
exec {program} "$@"
"""


@pytest.fixture
def unconfigured(tmp_path, monkeypatch) -> None:
    """No server configured, and a database of this test's own."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))


def test_ctrl_c_ends_the_run_its_stages_and_its_server(unconfigured, tmp_path):
    with started("run", write_config(tmp_path), in_foreground=True) as process:
        address = wait_for_line(process, "Prefect UI while it runs:").split()[-1]
        with urllib.request.urlopen(f"{address}/api/health") as answer:
            assert answer.status == 200
        wait_for_line(process, "sft:", "steps")
        below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "geb resume small" in output
    assert "Traceback" not in output
    assert "connection" not in output.lower(), "it spoke to a server that was gone"
    assert all(gone(pid) for pid in below)


def server_of(process: psutil.Process) -> psutil.Process:
    """The server below a `geb run`, not its supervisor."""
    servers = []
    for child in process.children(recursive=True):
        # What a waiting stage started may have ended.
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            if "uvicorn" in " ".join(words) and "--grace" not in words:
                servers.append(child)
    [server] = servers
    return server


def test_the_server_is_started_again_and_the_run_ends_well(unconfigured, tmp_path):
    path = trivial_stages.write_config(tmp_path, "served", parallel=1)
    config = yaml.safe_load(path.read_text())
    waiting = tmp_path / "waiting-python"
    program = config["execution"]["interpreters"]["train"]
    waiting.write_text(_WAITING_STAGE.format(go=tmp_path / "go", program=program))
    waiting.chmod(0o755)
    config["execution"]["interpreters"]["train"] = str(waiting)
    config["execution"]["retries"] = 0
    path.write_text(yaml.safe_dump(config))
    with started("run", path) as process:
        wait_for_line(process, "iteration-1/train: 1/2 steps")
        os.kill(server_of(psutil.Process(process.pid)).pid, signal.SIGKILL)
        line = wait_for_line(process, "starting it again")
        (tmp_path / "go").touch()
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (tmp_path / "store/runs/served") in Path(line.split("output: ")[1].split(")")[0]).parents
    assert "Traceback" not in output
    assert {step["state"] for step in steps(tmp_path / "store", "served").values()} <= {
        "done",
        "reused",
    }
