"""Progress in Prefect never makes a stage wait for the server."""

import threading

import pytest
from prefect.logging import disable_run_logger

from flows.execution import prefect_progress
from flows.execution.prefect_progress import PrefectProgress
from stages.contract.events import Progress
from stages.contract.request import Request


def test_a_stage_goes_on_while_the_server_does_not_answer(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gets the latest alone of what it says meanwhile."""
    asked, answered, last = threading.Event(), threading.Event(), threading.Event()
    sent: list[str] = []

    def create(percent: float, *, description: str, **_: object) -> str:
        assert threading.current_thread() is not threading.main_thread()
        asked.set()
        answered.wait()
        sent.append(description)
        return "an id"

    def update(artifact: str, *, description: str, **_: object) -> None:
        sent.append(description)
        last.set()

    monkeypatch.setattr(prefect_progress, "_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(prefect_progress, "create_progress_artifact", create)
    monkeypatch.setattr(prefect_progress, "update_progress_artifact", update)
    with disable_run_logger(), PrefectProgress("run", "step") as progress:
        progress.stage_event(request_, Progress(done=1, total=9, unit="steps"))
        asked.wait()
        for done in range(2, 10):
            progress.stage_event(request_, Progress(done=done, total=9, unit="steps"))
    # The stage is over, and the server has not answered yet.
    assert sent == []
    answered.set()
    last.wait()
    assert sent == ["1/9 steps", "9/9 steps"]
