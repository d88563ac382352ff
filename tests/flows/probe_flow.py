"""A flow of probe stages: as quick as orchestration can be, for tests of what surrounds a stage."""

from flows.execution.observer import Session
from flows.execution.prefect_tasks import step_tasks
from flows.execution.stage_flow import stage_flow
from flows.execution.step_executor import StepExecutor
from flows.pipeline.placement import Execution
from flows.pipeline.step import Step
from stages.contract.params import Settings
from stages.contract.request import Resources
from tests.probe_stage import ProbeParams


class ProbeResources(Settings):
    """Resources of the probe."""

    probe: Resources = Resources()
    """Resources of every probe."""


class ProbeConfig(Settings):
    """Some probes that depend on nothing, one after another or side by side."""

    name: str = "probes"
    """Name of the run."""
    store: str
    """Folder of the store."""
    probes: tuple[ProbeParams, ...] = ()
    """Behaviour of each probe."""
    resources: ProbeResources = ProbeResources()
    """Resources of the probes."""
    execution: Execution = Execution()
    """Start of the probes."""


@stage_flow("probes", "{config.name}")
def probes(config: ProbeConfig) -> None:
    """Runs the probes."""
    with step_tasks(StepExecutor(config), Session()) as tasks:
        for number, params in enumerate(config.probes):
            tasks.submit(Step(f"probe/{number}", params, {}, seed=number))
        tasks.wait()


if __name__ == "__main__":
    import sys
    from pathlib import Path

    probes(ProbeConfig.model_validate_json(Path(sys.argv[1]).read_text()))
