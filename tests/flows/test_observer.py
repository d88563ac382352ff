"""Observers and steps to compute again, set for a block of code around a step's execution."""

import threading
from contextvars import copy_context
from pathlib import Path

import pytest

from flows.execution.observer import Observer, observing, recomputing
from flows.execution.step_executor import StepExecutor
from flows.pipeline.step import Step
from stages.contract.errors import UserError
from stages.contract.events import Event, Log
from stages.contract.request import Request
from tests.flows.probe_flow import ProbeConfig
from tests.probe_stage import ProbeParams


class Recorder(Observer):
    """Keeps the calls as words."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def step_started(self, request: Request) -> None:
        self.heard.append(f"{request.step} started")

    def stage_event(self, request: Request, event: Event) -> None:
        if isinstance(event, Log):
            self.heard.append(event.message)

    def step_ended(self, request: Request, state: str, seconds: float, message: str) -> None:
        self.heard.append(f"{request.step} {state} {message}".strip())


@pytest.fixture
def config(tmp_path: Path, probe_stage: None) -> ProbeConfig:
    return ProbeConfig(store=str(tmp_path / "store"))


def execute(config: ProbeConfig, *behaviours: str) -> None:
    executor = StepExecutor(config)
    for behaviour in behaviours:
        executor.execute(Step("probe", ProbeParams(behaviour=behaviour), {}), {})


def test_every_observer_of_the_block_hears_of_a_step_and_none_afterwards(
    config: ProbeConfig,
) -> None:
    outer, inner = Recorder(), Recorder()
    with observing(outer):
        with observing(inner):
            execute(config, "tell_place")
        execute(config, "tell_place")
    execute(config, "tell_place")
    assert inner.heard[0] == "probe started"
    assert inner.heard[-1] == "probe done"
    assert len(inner.heard) > 2, "the stage's own words"
    assert outer.heard == [*inner.heard, "probe reused"]


def test_a_failure_is_heard_with_its_reason_also_from_a_thread(config: ProbeConfig) -> None:
    recorder = Recorder()

    def run() -> None:
        with pytest.raises(UserError):
            execute(config, "refuse")

    with observing(recorder):
        thread = threading.Thread(target=copy_context().run, args=(run,))
        thread.start()
        thread.join()
    assert recorder.heard[-1].startswith("probe failed probe (probe")


def test_a_forced_step_is_computed_again_once_in_a_run(config: ProbeConfig) -> None:
    execute(config, "tell_place")
    recorder = Recorder()
    with observing(recorder), recomputing(lambda step: step.stage == "probe"):
        execute(config, "tell_place", "tell_place")
    execute(config, "tell_place")
    assert "computed again on purpose" in recorder.heard[0]
    ended = [line for line in recorder.heard if line in ("probe done", "probe reused")]
    assert ended == ["probe done", "probe reused"]
