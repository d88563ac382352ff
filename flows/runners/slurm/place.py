"""Slurm runner: each stage a job, on as many nodes as its resources say.

The store is on a file system that this host and the nodes share. A job's folder in it is all that
orchestrator and batch program need of each other; Slurm is asked how the job is.
"""

import shutil

from flows.pipeline.placement import Execution
from flows.runners.place import StageJob, Work, work_name
from flows.runners.slurm import client
from flows.runners.slurm.job import batch_program
from flows.runners.slurm.submission import checked_interpreter, submit_job
from flows.runners.slurm.work import SlurmJob, folders_for, jobs_folder
from stages.contract.events import Log


class SlurmPlace:
    """A Slurm cluster."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def find(self, job: StageJob) -> Work | None:
        """See :class:`flows.runners.place.Place`; folders of jobs that are over are removed."""
        folders = folders_for(job.store, job.request.key)
        # Mostly there is none, and Slurm is not asked.
        numbers = client.own_jobs() if folders else {}
        work = None
        for folder in folders:
            number = numbers.get(folder.name)
            if number is None:
                # A job that sbatch still starts for it ends at once.
                shutil.rmtree(folder, ignore_errors=True)
            elif not (folder / "stop").exists():
                work = SlurmJob(number, folder, job, self._execution)
        return work

    def start(self, job: StageJob) -> Work:
        """See :class:`flows.runners.place.Place`."""
        request = job.request
        execution = self._execution
        interpreter = checked_interpreter(request, execution)
        name = work_name(request)
        folder = jobs_folder(job.store) / name
        folder.mkdir(parents=True)
        try:
            program = batch_program(request, execution, job.request_path, folder, interpreter)
            number = submit_job(request, execution, name, program)
        except BaseException:
            # A job that was taken, and whose number was lost on the way, ends at once.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        job.on_event(Log(message=f"job {number}: {name}"))
        return SlurmJob(number, folder, job, execution)
