"""Ownership of a stage's writable folders, where the orchestrator is root and the stage is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from flows.runners.docker.options import writable_folders
from stages.contract.errors import UserError
from stages.contract.local_store import LocalStore
from stages.contract.request import Request


def chown_outputs(request: Request, user: str) -> None:
    """Makes the folders that a stage writes to, and gives them to its user.

    Only root can give something away, and only root has to: any other orchestrator's stages run
    as itself.

    Args:
        request: The request.
        user: User and group id, ``1000:1000``.

    Raises:
        UserError: The user is not given by numbers.
    """
    for folder in writable_folders(request):
        folder.mkdir(parents=True, exist_ok=True)
    uid, _, gid = user.partition(":")
    if not (uid.isdecimal() and gid.isdecimal()):
        raise UserError(
            f"the image for stage {request.stage!r} runs as {user!r}, not as a user and group id",
            "set execution.docker.user, such as 1000:1000",
        )
    if os.geteuid() != 0 or int(uid) == 0:
        return
    for path in _needed(request):
        os.chown(path, int(uid), int(gid), follow_symlinks=False)


def _needed(request: Request) -> Iterator[Path]:
    store = LocalStore.open(request.store)
    yield from writable_folders(request)
    # What earlier attempts left, perhaps those of another runner.
    yield from store.work_path(request.stage, request.key).rglob("*")
    yield from (store.root / "leases" / request.stage).glob(f"{request.key}*")
    for scratch in (store.root / "artifacts" / request.stage).glob(
        f".scratch-{request.key[:16]}-*"
    ):
        yield scratch
        yield from scratch.rglob("*")
    if request.writes_registry:
        yield from (store.root / "models").rglob("*")
