"""`geb run` where no Prefect server is configured: it brings one for its own time."""

import contextlib
import os
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.flows.loop import ROOT, started, steps, wait_for_line, write_config
from tests.flows.probes import gone

pytestmark = pytest.mark.slow

# After an oracle's code: it waits in a stage, but not in its trial, until a file exists.
_WAITING = """
import time
from pathlib import Path

_score = score

def score(prompts, responses, references):
    while not responses[0].startswith("A trial") and not Path({go!r}).exists():
        time.sleep(0.1)
    return _score(prompts, responses, references)
"""


@pytest.fixture
def unconfigured(tmp_path, monkeypatch):
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


def server_of(process):
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
    oracle = tmp_path / "oracle.py"
    shipped = (ROOT / "data/quickstart/oracle.py").read_text()
    oracle.write_text(shipped + _WAITING.format(go=str(tmp_path / "go")))
    config = write_config(tmp_path, name="served", inputs={"oracle_code": str(oracle)})
    with started("run", config) as process:
        wait_for_line(process, "/score/0: started")
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
