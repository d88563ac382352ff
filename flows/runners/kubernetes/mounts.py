"""Volumes and mounts of a stage's pod: claims, at the paths at which the orchestrator sees them.

Pure: :mod:`flows.runners.kubernetes.manifest` puts them into a pod.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.pipeline.kubernetes import ClaimMount, KubernetesSettings
from flows.runners.local.outputs import writable_folders
from stages.contract.errors import UserError
from stages.contract.request import FileInput, Request


def volumes_for(settings: KubernetesSettings) -> list[dict[str, Any]]:
    """Volumes of a pod: its claims, and room that ends with it."""
    claims = {each.claim for each in settings.volumes.values()}
    shm = {"medium": "Memory", "sizeLimit": _mib(settings.shm_gib)}
    return [
        *(
            {"name": volume_name(each), "persistentVolumeClaim": {"claimName": each}}
            for each in sorted(claims)
        ),
        {"name": "tmp", "emptyDir": {"sizeLimit": _mib(settings.tmp_gib)}},
        {"name": "shm", "emptyDir": shm},
    ]


def mounts_for(
    request: Request, settings: KubernetesSettings, *, writes: bool = True
) -> list[dict[str, Any]]:
    """Mounts of a stage: claims read-only, but for what is configured and its own store folders.

    Args:
        request: The request.
        settings: The kubernetes runner's settings.
        writes: Whether it gets folders of the store to write to.

    Raises:
        UserError: The store or an input lies in no claim.
    """
    root = Path(request.store)
    _mount_of(root, settings, "the store", f"{root}: {{claim: NAME}}")
    for each in request.sources():
        if isinstance(each, FileInput):
            place = Path(each.location)
            _mount_of(place, settings, "an input", f"{place.parent}: {{claim: NAME}}")
    mounts = {
        path: _mount(each.claim, path, each.sub_path, read_only=not each.writable)
        for path, each in settings.volumes.items()
    }
    for folder in writable_folders(request) if writes else ():
        path, volume = _mount_of(folder, settings, "the store", "")
        within = (Path(volume.sub_path) / folder.relative_to(path)).as_posix()
        mounts[str(folder)] = _mount(volume.claim, str(folder), within, read_only=False)
    # A runtime mounts in this order: what is inside another mount comes after it.
    return [
        *(mounts[path] for path in sorted(mounts)),
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def volume_name(claim: str) -> str:
    """Name of a claim's volume within a pod: names of volumes have no dots."""
    return "claim-" + claim.replace(".", "-")


def _mount_of(
    place: Path, settings: KubernetesSettings, what: str, example: str
) -> tuple[Path, ClaimMount]:
    found = settings.volume_at(place)
    if found is None:
        raise UserError(
            f"{what} is at {place}, and pods see no volume there",
            f"name the claim that holds it in execution.kubernetes.volumes (`{example}`)",
        )
    return found


def _mount(claim: str, path: str, within: str, *, read_only: bool) -> dict[str, Any]:
    made = {"name": volume_name(claim), "mountPath": path, "readOnly": read_only}
    if within and within != ".":
        made["subPath"] = within
    return made


def _mib(gib: float) -> str:
    return f"{int(gib * 1024)}Mi"
