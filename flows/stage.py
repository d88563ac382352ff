"""The flow `stage`: one stage, sent to a work pool by the work-pool runner.

It runs on a worker's host and starts the stage there, as a run on that host itself would.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from flows.execution.cancellation import ends_cancelled, stops_when_cancelled
from flows.execution.hooks import remove_containers
from flows.execution.prefect_progress import PrefectProgress, artifact_key
from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from flows.runners.work_pool.flow_runs import StageFailure
from stages.contract.errors import StageFailedError, StoppedError, UserError
from stages.contract.request import Request

# Prefect shows it in place of "Failed": no retry cures it.
REFUSED = "Refused"


def _name() -> str:
    request = flow_run.parameters["request"]
    return f"{request.run} · {request.step}"


@flow(
    name="stage",
    flow_run_name=_name,
    persist_result=False,
    on_cancellation=[remove_containers],
    on_crashed=[remove_containers],
)
@ends_cancelled
def stage(request: Request, execution: Execution) -> State[Any]:
    """Runs one stage for an orchestrator that runs elsewhere; `geb run` starts it, not a person.

    Args:
        request: What to compute.
        execution: How this host starts it.
    """
    runner = make_runner(execution)
    try:
        with (
            stops_when_cancelled(runner.stop_all, request.step),
            PrefectProgress(request.run, request.step) as progress,
        ):
            runner.run(request, lambda event: progress.stage_event(request, event))
    except (UserError, StageFailedError) as error:
        StageFailure.of(error).publish(artifact_key(request.run, request.step, "failure"))
        name = REFUSED if isinstance(error, UserError) else "Failed"
        return Failed(name=name, message=str(error))
    except StoppedError as error:
        return Failed(message=str(error))
    finally:
        runner.stop_all()
    return Completed(message=f"the store has {request.stage}/{request.key[:12]}")
