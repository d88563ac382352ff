"""Failures that no retry cures, while other stages are at work."""

import os
import sys
import threading
from pathlib import Path

import pytest

from flows.execution import step_executor
from flows.execution.observer import Session
from flows.execution.prefect_tasks import step_tasks
from flows.execution.run_record import RunRecord
from flows.execution.stage_flow import call_as_flow
from flows.execution.step_executor import StepExecutor
from flows.pipeline.placement import Execution
from flows.pipeline.step import Step
from flows.runners.local.process import ProcessPlace
from flows.runners.runner import Runner
from stages.contract.errors import RefusedError, UserError
from stages.store.base import Store
from tests.flows.probe_flow import ProbeConfig
from tests.flows.probes import wait_until, write_probes
from tests.probe_stage import ProbeParams
from tests.programs import run_program


class Refusing(Runner):
    """A place that refuses a probe by its message, once another one is at work."""

    def __init__(self, execution):
        super().__init__(ProcessPlace(execution), execution)

    def run(self, request, on_event):
        if request.params["message"] in ("refused", "wrong"):
            wait_until(lambda: list(Path(request.store).glob("logs/probe/*/*.log")))
        if request.params["message"] == "refused":
            raise RefusedError(f"{request.step}: the quota does not allow the pod", "lower it")
        if path := request.params["path"]:
            threading.Thread(target=self._release, args=(Path(path),)).start()
        super().run(request, on_event)

    def _release(self, path):
        """Reads the pipe at ``path``, so that the probe that writes to it goes on."""
        self.closed.wait(timeout=20)
        path.read_text()


def run(path):
    """Runs probes in this process, the last one after the first."""
    step_executor.make_runner = Refusing
    config = ProbeConfig.model_validate_json(Path(path).read_text())

    def flow():
        with step_tasks(StepExecutor(config), Session()) as tasks:
            first, second, last = config.probes
            tasks.submit(Step("first", first, {}))
            tasks.submit(Step("second", second, {}, seed=1))
            tasks.submit(Step("last", last, {}, seed=2, after=["first"]))
            tasks.wait()

    try:
        call_as_flow("probes", "probes", flow)
    except UserError as error:
        sys.exit(f"refused: {error.message}")


@pytest.mark.parametrize(
    ("first", "second", "states", "error"),
    [
        (
            ProbeParams(behaviour="hang"),
            ProbeParams(message="refused"),
            {"first": "stopped", "second": "failed"},
            "the quota does not allow the pod",
        ),
        (
            ProbeParams(behaviour="write", path="pipe"),
            ProbeParams(message="wrong", behaviour="refuse"),
            {"first": "done", "second": "failed", "last": "stopped"},
            "bad value 7",
        ),
    ],
    ids=["the place refuses it", "it refuses its request"],
)
def test_a_failure_that_no_retry_cures_starts_no_other_stage(
    prefect_server, tmp_path, probe_stage, first, second, states, error
):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if first.path:
        first = first.model_copy(update={"path": str(pipe)})
    config = ProbeConfig(
        store=str(tmp_path / "store"),
        probes=(first, second, ProbeParams()),
        execution=Execution(parallel=2),
    )
    code = "import sys; from tests.flows.execution.test_refused_stage import run; run(sys.argv[1])"
    done = run_program(sys.executable, "-c", code, write_probes(tmp_path, config))
    assert error in done.stderr.splitlines()[-1]
    record = RunRecord(Store.in_folder(config.store), "probes")
    assert {step.step: step.state for step in record.steps()} == states
    logs = [path.parent.name for path in record.store.root.glob("logs/probe/*/*.log")]
    assert not [step for step in record.steps() if step.step == "last" and step.key in logs]
    if first.path:
        mended = config.model_copy(update={"probes": (first, ProbeParams(), ProbeParams())})
        again = run_program(sys.executable, "-c", code, write_probes(tmp_path, mended))
        assert again.returncode == 0
        assert {step.step: step.state for step in record.steps()} == {
            "first": "reused",
            "second": "done",
            "last": "done",
        }
