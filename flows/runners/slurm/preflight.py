"""Question to Slurm, before anything is started, whether it would run the jobs of each stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flows.pipeline.placement import Execution
from flows.pipeline.slurm import SlurmSettings
from flows.runners.health import trial_request
from flows.runners.slurm import client
from flows.runners.slurm.client import SlurmUnavailableError
from flows.runners.slurm.job import submit_options
from flows.runners.slurm.refusals import concerns_nodes, meaning_of, mistake
from stages.contract.params import Settings
from stages.contract.request import Request, Resources


def check_jobs(execution: Execution, resources: Settings) -> None:
    """Checks settings and resources of all stages.

    Args:
        execution: Holds the slurm runner's settings.
        resources: `Resources` of each stage, by its name.

    Raises:
        UserError: Slurm would never run the job of a stage, or its commands are not here.
    """
    asked = set()
    for stage, needs in stage_resources(resources):
        request = trial_request(stage, needs)
        options = tuple(submit_options(request, execution.slurm, execution.grace_seconds))
        if options not in asked:
            asked.add(options)
            check_job(request, execution.slurm, execution.grace_seconds)


def check_job(request: Request, settings: SlurmSettings, grace_seconds: float) -> None:
    """Checks one job.

    Raises:
        UserError: Slurm would never run it.
    """
    # A controller that is away for now does not make a setting wrong.
    with contextlib.suppress(SlurmUnavailableError):
        said = client.check(submit_options(request, settings, grace_seconds))
        if not said or meaning_of(said) != "mistake":
            return
        job = settings.job(request.stage)
        # A node that died may be the one that is wanted: the job waits for it.
        if not (concerns_nodes(said) and client.nodes_away(job.partition)):
            raise mistake(said, request, job)


def stage_resources(resources: Settings) -> Iterator[tuple[str, Resources]]:
    """Name and resources of each stage."""
    for stage in type(resources).model_fields:
        yield stage, getattr(resources, stage)
