"""Reaper: folders of jobs that are over, and jobs at work whose orchestrator is dead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from flows.runners.local.attempt_log import left_log
from flows.runners.slurm import client
from flows.runners.slurm.folder import JobFolder, job_folders, owner_path
from stages.contract.file_lease import FileLease
from stages.contract.local_store import LocalStore

_OUTPUTS = ("log", "others", "slurm.out")


def sweep(store: LocalStore, *, cancel: bool = False) -> list[str]:
    """Removes the folders of jobs that dead orchestrators left; what they printed is kept.

    Args:
        store: The store.
        cancel: End jobs of dead orchestrators that are at work or pending, too.

    Returns:
        A line for each job.

    Raises:
        SlurmUnavailableError: The controller does not answer.
    """
    _remove_dead_owners(store)
    left = [folder for folder in job_folders(store) if not folder.has_owner()]
    if not left:
        return []
    active = {each.name: each.id for each in client.own_jobs() if not each.is_over}
    return [line for folder in left for line in _sweep(store, folder, active, cancel=cancel)]


def _sweep(
    store: LocalStore, folder: JobFolder, active: dict[str, str], *, cancel: bool
) -> Iterator[str]:
    if (job := active.get(folder.name)) is None:
        _keep_output(store, folder)
        folder.remove()
        yield f"removed the folder of job {folder.name}: its orchestrator is gone"
    elif cancel:
        folder.ask_to_stop()
        client.cancel_pending([job])
        client.signal_steps([job])
        yield f"asked job {job} ({folder.name}) to end: its orchestrator is gone"


def _keep_output(store: LocalStore, folder: JobFolder) -> None:
    request = folder.request()
    with left_log(store.root, request.stage, request.key, folder.name).open("wb") as kept:
        for name in _OUTPUTS:
            with contextlib.suppress(FileNotFoundError):
                kept.write((folder.path / name).read_bytes())


def _remove_dead_owners(store: LocalStore) -> None:
    folder = owner_path(store, "any").parent
    for path in folder.glob("*.alive"):
        lease = path.with_suffix("")
        if FileLease(lease).holder() is None:
            remove_owner(lease)


def remove_owner(lease: Path) -> None:
    """Removes the files of an orchestrator's lease that nobody holds and nobody will ask for."""
    for each in (lease, lease.with_suffix(".guard"), lease.with_suffix(".alive")):
        each.unlink(missing_ok=True)
