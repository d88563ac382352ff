"""Lines that a run prints where there is no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from flows.execution import console
from flows.execution.console import ConsoleObserver
from stages.contract.events import Progress
from stages.contract.local_store import LocalStore
from tests.probe_requests import probe_request


def test_each_phase_of_a_stage_begins_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_LINE_SECONDS", float("inf"))
    request = probe_request(LocalStore.open(str(tmp_path / "store"), create=True))
    written = io.StringIO()
    with ConsoleObserver(Console(file=written, width=100), 1) as observer:
        observer.step_started(request)
        for done, unit in ((1, "pairs"), (2, "pairs"), (0, "steps"), (1, "steps")):
            observer.stage_event(request, Progress(done=done, total=2, unit=unit))
        observer.step_started(request)
        observer.stage_event(request, Progress(done=1, total=2, unit="pairs"))
    lines = [line.split(": ", 1)[1] for line in written.getvalue().splitlines()]
    assert [" ".join(line.split()[:2]) for line in lines if "/2" in line] == [
        "1/2 pairs",
        "0/2 steps",
        "1/2 pairs",
    ]
