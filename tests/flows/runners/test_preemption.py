"""A stage whose machine was taken from it: it starts again, and no retry is used up."""

import threading

import pytest

from flows.execution import step_executor
from flows.execution.observer import Observer
from flows.execution.run_record import RunRecord
from flows.execution.step_executor import StepExecutor
from flows.pipeline.placement import Execution
from flows.pipeline.step import Step
from flows.runners.local.process import ProcessPlace
from flows.runners.runner import Runner
from stages.contract.errors import DamagedArtifactError, PreemptedError, StoppedError
from stages.contract.events import Log
from stages.store.base import Store
from tests.flows.probe_flow import ProbeConfig
from tests.flows.probes import wait_until
from tests.probe_stage import ProbeParams

STEP = Step("probe/0", ProbeParams(), {})


class Preempting(Runner):
    """A scheduler that takes the machine from a stage some times before it lets it run.

    Args:
        saved: What the stage saves into its work folder before each preemption, in turn.
        text: What it adds to that file.
    """

    def __init__(self, *saved, text=""):
        super().__init__(ProcessPlace(Execution()), Execution())
        self.attempts = 0
        self._saved = saved
        self._text = text

    def run(self, request, on_event):
        self.attempts += 1
        if self.attempts <= len(self._saved):
            work = Store.in_folder(request.store).work_path(request.stage, request.key)
            work.mkdir(parents=True, exist_ok=True)
            with (work / self._saved[self.attempts - 1]).open("a") as file:
                file.write(self._text)
            raise PreemptedError(f"{request.step}: job {self.attempts} was preempted")
        super().run(request, on_event)


class Heard(Observer):
    """States of a step, in order."""

    def __init__(self):
        self.calls = []

    def step_started(self, request):
        self.calls.append("started")

    def stage_event(self, request, event):
        if isinstance(event, Log) and event.message.startswith("preempted: "):
            self.calls.append("preempted")

    def step_ended(self, request, state, seconds, message):
        self.calls.append(state)


@pytest.fixture
def config(tmp_path, probe_stage, monkeypatch):
    monkeypatch.setattr(step_executor, "RETRY_SECONDS", 0.0)
    return ProbeConfig(
        store=str(tmp_path / "store"), probes=(ProbeParams(),), execution=Execution(retries=0)
    )


def executor_with(config, runner):
    executor = StepExecutor(config)
    executor.runner = runner
    return executor


def test_it_starts_again_as_often_as_its_checkpoint_has_moved_on(config):
    runner, heard = Preempting("checkpoint-1", "checkpoint-2", "checkpoint-3"), Heard()
    result = executor_with(config, runner).execute(STEP, {}, heard)
    assert result.artifact.path.exists()
    assert heard.calls == [*("started", "preempted") * 3, "started", "done"]


def test_without_another_checkpoint_restarts_are_limited(config, monkeypatch):
    monkeypatch.setattr(step_executor, "_MOST_PREEMPTIONS", 3)
    saved = ["checkpoint-1"] * 3 + ["checkpoint-2"] * 4
    runner = Preempting(*saved)
    with pytest.raises(PreemptedError, match=r"job 7 .* 4 in a row without a new checkpoint"):
        executor_with(config, runner).execute(STEP, {})
    assert runner.attempts == len(saved), "a new checkpoint begins the count again"


def test_a_chunk_that_grows_is_progress(config, monkeypatch):
    monkeypatch.setattr(step_executor, "_MOST_PREEMPTIONS", 1)
    runner = Preempting(*["000-128.parquet"] * 3, text="more")
    executor_with(config, runner).execute(STEP, {})
    assert runner.attempts == 4


def test_the_pause_doubles_while_no_checkpoint_comes(config, monkeypatch):
    monkeypatch.setattr(step_executor, "RETRY_SECONDS", 1.0)
    executor = executor_with(config, Preempting(*["checkpoint-1"] * 3))
    pauses = []
    monkeypatch.setattr(executor.runner.stopping, "wait", pauses.append)
    executor.execute(STEP, {})
    assert pauses == [1.0, 2.0, 4.0]


def test_a_stopped_run_does_not_restart_a_preempted_step(config, monkeypatch):
    monkeypatch.setattr(step_executor, "RETRY_SECONDS", 3600.0)
    runner = Preempting("checkpoint-1")
    executor = executor_with(config, runner)
    record = RunRecord(executor.store, config.name)

    def stop_once_preempted():
        wait_until(lambda: [step.state for step in record.steps()] == ["preempted"])
        executor.stop()

    stopper = threading.Thread(target=stop_once_preempted)
    stopper.start()
    with pytest.raises(StoppedError):
        executor.execute(STEP, {})
    stopper.join()
    assert runner.attempts == 1


class Stopping(Preempting):
    """A place that goes away while the run stops."""

    def run(self, request, on_event):
        self.stop()
        raise PreemptedError("the engine does not answer")


def test_a_step_that_loses_its_place_while_the_run_stops_was_stopped(config):
    runner, heard = Stopping(), Heard()
    executor = executor_with(config, runner)
    runner.stop = executor.stop
    with pytest.raises(StoppedError):
        executor.execute(STEP, {}, heard)
    assert heard.calls[-1] == "stopped"


class Forgetful(Preempting):
    """A place that runs stages well, over another store than the run's."""

    def run(self, request, on_event):
        """Ends well, and leaves nothing."""


def test_a_stage_that_leaves_nothing_in_the_store_has_failed(config):
    executor, heard = executor_with(config, Forgetful()), Heard()
    with pytest.raises(DamagedArtifactError, match="see the same store"):
        executor.execute(STEP, {}, heard)
    assert heard.calls == ["started", "failed"]
    assert [step.state for step in RunRecord(executor.store, config.name).steps()] == ["failed"]
