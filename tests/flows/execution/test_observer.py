"""Observers of a step's execution."""

import contextlib
from typing import ClassVar

import pytest

from flows.execution.observer import Observer
from flows.execution.run_record import RunRecord
from flows.execution.step_executor import StepExecutor, build_request
from flows.pipeline.step import Step
from stages.contract.errors import StoreError, UserError
from stages.contract.events import Log
from stages.store.locks import FileLease
from tests.flows.probe_flow import ProbeConfig
from tests.probe_stage import ProbeParams


class Recorder(Observer):
    """Keeps the calls as words."""

    def __init__(self):
        self.heard = []

    def step_started(self, request):
        self.heard.append(f"{request.step} started")

    def stage_event(self, request, event):
        if isinstance(event, Log):
            self.heard.append(event.message)

    def step_ended(self, request, state, seconds, message):
        self.heard.append(f"{request.step} {state} {message}".strip())


@pytest.fixture
def config(tmp_path, probe_stage):
    return ProbeConfig(store=str(tmp_path / "store"))


def execute(config, *behaviours, observers=()):
    executor = StepExecutor(config, observers)
    for behaviour in behaviours:
        executor.execute(Step("probe", ProbeParams(behaviour=behaviour), {}), {})


def test_a_notice_that_cannot_be_recorded_does_not_end_the_stage(config, monkeypatch):
    save_step = RunRecord.save_step

    def save_what_has_no_message(record, step):
        if step.message:
            raise StoreError("the bucket does not answer")
        save_step(record, step)

    monkeypatch.setattr(RunRecord, "save_step", save_what_has_no_message)
    execute(config, "tell_place")


def test_observers_of_a_run_and_of_a_step_hear_of_it(config):
    of_run, of_step = Recorder(), Recorder()
    executor = StepExecutor(config, [of_run])
    step = Step("probe", ProbeParams(behaviour="tell_place"), {})
    executor.execute(step, {}, of_step)
    executor.execute(step, {})
    assert of_step.heard[0] == "probe started"
    assert of_step.heard[-1] == "probe done"
    assert len(of_step.heard) > 2, "the stage's own words"
    assert of_run.heard == [*of_step.heard, "probe reused"]


def test_a_step_waits_while_another_run_looks_after_its_key(config):
    executor = StepExecutor(config)
    step = Step("probe", ProbeParams(behaviour="tell_place"), {})
    request = build_request(config, executor.store, step, {})
    with contextlib.ExitStack() as other:
        path = executor.store.orchestrator_path(step.stage, request.key)
        other.enter_context(FileLease(path)).acquire()

        class States(Observer):
            heard: ClassVar = []

            def stage_event(self, request, event):
                recorded = executor.record.step("probe")
                self.heard.append((recorded.state, recorded.message[:11]))
                other.close()

        executor.execute(step, {}, States())
    assert States.heard[0] == ("waiting", "another run")
    assert set(States.heard[1:]) == {("running", "")}


def test_a_failure_is_heard_with_its_reason(config):
    recorder = Recorder()
    with pytest.raises(UserError):
        execute(config, "refuse", observers=[recorder])
    assert recorder.heard[-1].startswith("probe failed probe (probe")
