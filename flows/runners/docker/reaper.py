"""Reaper: removes containers whose orchestrator is dead.

A container names a file that its orchestrator keeps locked while it lives. Whether that is so can
be told from any process of the machine that sees the store, and from no other: containers of a
store that is not to be seen here are left alone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError

from flows.runners.docker.client import connect
from flows.runners.docker.container import stop
from flows.runners.docker.options import (
    ALIVE_LABEL,
    AT_WORK,
    DEATH_LABEL,
    KEY_LABEL,
    STAGE_LABEL,
    STORE_LABEL,
)
from flows.runners.local.attempt_log import left_log
from stages.contract.file_locks import AliveLock


def reap(*, keep_running: bool, grace_seconds: float = 10.0) -> list[str]:
    """Stops and removes containers that dead orchestrators left.

    Args:
        keep_running: Leave containers at work that were told to outlive their orchestrator.
        grace_seconds: Time for a stage to end before it is killed.

    Returns:
        A line for each container that was removed.

    Raises:
        UserError: No Docker engine answers.
    """
    client = connect()
    removed = []
    with contextlib.closing(client):
        for each in client.api.containers(all=True, filters={"label": ALIVE_LABEL}):
            labels = each["Labels"]
            is_kept = labels[DEATH_LABEL] == "keep" and each["State"] in AT_WORK
            if (is_kept and keep_running) or not Path(labels[STORE_LABEL]).is_dir():
                continue
            lock = AliveLock(Path(labels[ALIVE_LABEL]))
            if lock.take():
                _remove(client, each, grace_seconds)
                lock.free(remove=True)
                name = each["Names"][0].lstrip("/")
                removed.append(f"removed container {name}: its orchestrator is gone")
    return removed


def _remove(client: docker.DockerClient, found: dict[str, Any], grace_seconds: float) -> None:
    # Another reaper may be as far as this one.
    with contextlib.suppress(APIError):
        stop(found["Id"], grace_seconds)
        # Its output since its orchestrator's death is nowhere else.
        labels = found["Labels"]
        store, stage, key = Path(labels[STORE_LABEL]), labels[STAGE_LABEL], labels[KEY_LABEL]
        log = left_log(store, stage, key, found["Id"][:12])
        log.write_bytes(client.api.logs(found["Id"]))
        client.api.remove_container(found["Id"], force=True, v=True)
