"""`geb run` where no Prefect server is configured: it brings one for its own time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.flows.loop import wait_for_line, write_config

pytestmark = pytest.mark.slow


@pytest.fixture
def unconfigured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server configured, and a database of this test's own."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))


def test_ctrl_c_ends_the_run_its_stages_and_its_server(unconfigured: None, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.commands.cli", "run", str(write_config(tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A process group like that of a terminal's foreground job.
        start_new_session=True,
    )
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
    for pid in below:
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], check=True)
