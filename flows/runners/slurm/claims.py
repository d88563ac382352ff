"""Claims on a request: the jobs that compute it already, whoever submitted them."""

from __future__ import annotations

from flows.runners.slurm.folder import JobFolder, job_folders
from flows.runners.slurm.job import computes
from flows.runners.slurm.polling import QueuePoller
from stages.contract.local_store import LocalStore
from stages.contract.request import Request


class Claims:
    """Claims on requests, as the store's folders and the queue tell them.

    Args:
        poller: Answers for the queue.
    """

    def __init__(self, poller: QueuePoller) -> None:
        self._poller = poller

    def of(self, request: Request) -> list[tuple[str | None, JobFolder]]:
        """Jobs that compute a request, and, without a number, those being submitted elsewhere."""
        jobs = {folder.name: job for job, folder in self.jobs(request)}
        claims: list[tuple[str | None, JobFolder]] = []
        for folder in _folders_for(request):
            if folder.name in jobs or folder.has_owner():
                claims.append((jobs.get(folder.name), folder))
            else:
                # Its orchestrator died while it called sbatch: should a job come of that, it ends.
                folder.ask_to_stop()
        return claims

    def jobs(self, request: Request) -> list[tuple[str, JobFolder]]:
        """Jobs at work or pending that compute a request, with their folders."""
        folders = {each.name: each for each in _folders_for(request)}
        # Mostly there is none, and Slurm is not asked.
        if not folders:
            return []
        jobs = self._poller.recent(since=max(each.made_at() for each in folders.values()))
        return [
            (job.id, folders[job.name]) for job in jobs if not job.is_over and job.name in folders
        ]


def _folders_for(request: Request) -> list[JobFolder]:
    store = LocalStore.open(request.store)
    folders = [each for each in job_folders(store) if computes(each.name, request)]
    # A job that has been told to end computes nothing for those who come later.
    return [each for each in folders if each.has_owner() or not each.is_stopped()]
