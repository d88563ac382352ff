"""Folders of the store that a stage writes to, and their owner where the orchestrator is root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from stages.contract.local_store import LocalStore
from stages.contract.request import Request


def writable_folders(request: Request) -> list[Path]:
    """Folders of the store that a stage writes to; it sees the rest read-only."""
    store = LocalStore.open(request.store)
    folders = [store.root / "artifacts" / request.stage, store.root / "leases" / request.stage]
    for each in request.all:
        folders += [
            store.work_path(each.stage, each.key),
            store.log_path(each.stage, each.key),
        ]
    if request.writes_registry:
        folders.append(store.root / "models")
    return folders


def chown_outputs(request: Request, uid: int, gid: int) -> None:
    """Makes the folders that a stage writes to, and gives them to its user.

    Only root can give something away, and only root has to: any other orchestrator's stages run
    as itself.

    Args:
        request: The request.
        uid: Its stage's user.
        gid: And group.
    """
    for folder in writable_folders(request):
        folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or uid == 0:
        return
    for path in _needed(request):
        os.chown(path, uid, gid, follow_symlinks=False)


def remove_empty_work(request: Request) -> None:
    """Removes the work folders that a stage has emptied.

    They were mounts while its container or pod ran: it could not remove them itself.
    """
    store = LocalStore.open(request.store)
    for each in request.all:
        # One that is not empty is a failed attempt's.
        with contextlib.suppress(OSError):
            store.work_path(each.stage, each.key).rmdir()


def _needed(request: Request) -> Iterator[Path]:
    store = LocalStore.open(request.store)
    yield from writable_folders(request)
    for each in request.all:
        yield from _left(store, each)
    if request.writes_registry:
        yield from (store.root / "models").rglob("*")


def _left(store: LocalStore, request: Request) -> Iterator[Path]:
    """Files of earlier attempts, perhaps by another runner."""
    yield from store.work_path(request.stage, request.key).rglob("*")
    yield from (store.root / "leases" / request.stage).glob(f"{request.key}*")
    for scratch in (store.root / "artifacts" / request.stage).glob(
        f".scratch-{request.key[:16]}-*"
    ):
        yield scratch
        yield from scratch.rglob("*")
