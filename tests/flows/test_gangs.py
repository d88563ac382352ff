"""Pods of one attempt: whose end is the end of all, without a cluster."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.kubernetes.attempt import PodAttempt
from flows.runners.kubernetes.watch import PodChange
from stages.contract.local_store import LocalStore
from stages.contract.request import Request, Resources
from tests.probe_requests import probe_request


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    store = LocalStore.open(str(tmp_path / "store"), create=True)
    return probe_request(store, Resources(nodes=2))


def pod(name: str, code: int | None = None) -> dict[str, Any]:
    """A pod that runs, or has ended with an exit code."""
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"image": "geb-torch:1"}]},
        "status": {"phase": "Running", "containerStatuses": [{"state": state}]},
    }


class Pods:
    """Two pods whose ends come one after the other; deleted ones end by SIGTERM.

    Args:
        ended: Pods that have ended, with their exit codes.
        later: Pods that end when those that watch have had one more round.
    """

    server = "here"

    def __init__(self, ended: tuple[str, int], *later: tuple[str, int]) -> None:
        self.deleted: list[str] = []
        self._ended = ended
        self._later = list(later)
        self._changes: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @contextmanager
    def watched(self, names: list[str], changes: queue.SimpleQueue[Any]) -> Iterator[None]:
        self._changes = changes
        for each in (pod("first"), pod("second"), pod(*self._ended)):
            changes.put(PodChange(each["metadata"]["name"], each))
        yield

    def silent_seconds(self) -> float:
        """Called in each round."""
        while self._later:
            name, code = self._later.pop()
            self._changes.put(PodChange(name, pod(name, code)))
        return 0.0

    def log(self, name: str, **_: object) -> Iterator[bytes]:
        return iter(())

    def delete_pod(self, name: str) -> None:
        self.deleted.append(name)
        self._changes.put(PodChange(name, pod(name, 143)))


@pytest.mark.parametrize(
    ("ends", "codes", "deleted"),
    [
        # The first one saves what both have trained.
        ([("second", 0), ("first", 0)], [0, 0], []),
        ([("second", 64)], [143, 64], ["first"]),
        # A killed pod is heard of later than the one that lost its connection to it.
        ([("first", 1), ("second", 137)], [1, 137], []),
    ],
)
def test_a_pod_that_fails_ends_the_others_once_the_cause_is_known(
    request_: Request, ends: list[tuple[str, int]], codes: list[int], deleted: list[str]
) -> None:
    cluster: Any = Pods(*ends)
    both = [pod("first"), pod("second")]
    attempt = PodAttempt(cluster, request_, KubernetesSettings(), 5, both, lambda event: None)
    endings = attempt.follow(cluster, lambda *_: None, lambda: None, threading.Event())
    assert [each.code for each in endings] == codes
    assert cluster.deleted == deleted
