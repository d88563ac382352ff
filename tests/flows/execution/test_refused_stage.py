"""A stage that its place refuses, while others are at work."""

import sys
from pathlib import Path

from flows.execution import step_executor
from flows.execution.run_record import RunRecord
from flows.pipeline.placement import Execution
from flows.runners.local.process import ProcessPlace
from flows.runners.runner import Runner
from stages.contract.errors import RefusedError
from stages.store.base import Store
from tests.flows.probe_flow import ProbeConfig, probes
from tests.flows.probes import hanging_pids, write_probes
from tests.probe_stage import ProbeParams
from tests.programs import run_program


class Refusing(Runner):
    """A place that refuses a probe by its message, once another one is at work."""

    def __init__(self, execution):
        super().__init__(ProcessPlace(execution), execution)

    def run(self, request, on_event):
        if request.params["message"] == "refused":
            hanging_pids(Path(request.store))
            raise RefusedError(f"{request.step}: the quota does not allow the pod", "lower it")
        super().run(request, on_event)


def run(path):
    """Runs probes in this process; the place refuses one of them."""
    step_executor.make_runner = Refusing
    try:
        probes(ProbeConfig.model_validate_json(Path(path).read_text()))
    except RefusedError as error:
        sys.exit(f"refused: {error.message}")


def test_a_stage_that_its_place_refuses_ends_the_run_at_once(prefect_server, tmp_path, probe_stage):
    config = ProbeConfig(
        store=str(tmp_path / "store"),
        probes=(ProbeParams(behaviour="hang"), ProbeParams(message="refused")),
        execution=Execution(parallel=2),
    )
    code = "import sys; from tests.flows.execution.test_refused_stage import run; run(sys.argv[1])"
    done = run_program(sys.executable, "-c", code, write_probes(tmp_path, config))
    assert done.stderr.endswith("refused: probe/1: the quota does not allow the pod\n")
    states = {
        step.step: step.state for step in RunRecord(Store.in_folder(config.store), "probes").steps()
    }
    assert states == {"probe/0": "stopped", "probe/1": "failed"}
