"""Diagnosis of a pod by its state, without a cluster."""

import io
from pathlib import Path

import pytest

from flows.runners.attempt_log import AttemptLog
from flows.runners.ending import Ending, raise_for
from flows.runners.kubernetes.diagnosis import ending_of, refused
from flows.runners.place import NoRoomError
from stages.contract.errors import EXIT_USER, StageFailedError, UserError
from stages.contract.events import Failure


def failed(reason, message=""):
    """A pod whose containers have left no state."""
    return {"status": {"phase": "Failed", "reason": reason, "message": message}}


def terminated(code, reason="Error"):
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return {"status": {"phase": "Failed", "containerStatuses": [{"state": state}]}}


def disrupted(pod, kind, reason, message):
    """A pod that the cluster has taken away."""
    condition = {"type": kind, "status": "True", "reason": reason, "message": message}
    return {"status": pod["status"] | {"conditions": [condition]}}


ENDED = terminated(143)
EVICTED = failed("Evicted", "The node was low on resource: memory.")


@pytest.mark.parametrize(
    ("state", "kind", "said"),
    [
        (terminated(64), "exited", ""),
        (terminated(143), "preempted", "asked to end"),
        (terminated(255, "Unknown"), "preempted", "node"),
        (terminated(137, "OOMKilled"), "out_of_memory", ""),
        (
            disrupted(EVICTED, "DisruptionTarget", "TerminationByKubelet", "low on memory"),
            "preempted",
            "TerminationByKubelet: low on memory",
        ),
        (failed("Evicted", 'Usage of EmptyDir "tmp" exceeds "1Mi"'), "failed", 'exceeds "1Mi"'),
        (failed("NodeLost"), "preempted", "NodeLost"),
        (failed("OutOfcpu", "Pod was rejected"), "preempted", "OutOfcpu"),
        (terminated(128, "StartError"), "refused", ""),
        (
            disrupted(ENDED, "DisruptionTarget", "PreemptionByScheduler", "for a pod"),
            "preempted",
            "PreemptionByScheduler: for a pod",
        ),
        (
            disrupted(ENDED, "TerminationTarget", "StoppedByKueue", "Preempted for a Workload"),
            "preempted",
            "StoppedByKueue: Preempted",
        ),
    ],
)
def test_each_end_of_a_pod_has_its_meaning(state, kind, said):
    ending = ending_of(state)
    assert ending.kind == kind
    assert said in ending.message


def test_a_mistake_comes_before_the_wish_to_stop(request_):
    log = AttemptLog(Path("stage.log"), io.StringIO())
    log.failure = Failure(kind="user", message="bad value", remedy="use 8")
    with pytest.raises(UserError, match="bad value"):
        raise_for(Ending("exited", EXIT_USER), log, request_, stopped=True)


QUOTA = 'pods "x" is forbidden: exceeded quota: team, requested: limits.cpu'
LIMITS = "limits.cpu=1,pods=3"


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (403, f"{QUOTA}=1,pods=1, used: limits.cpu=500m,pods=3, limited: {LIMITS}", NoRoomError),
        (403, f"{QUOTA}=1500m,pods=1, used: limits.cpu=0,pods=0, limited: {LIMITS}", UserError),
        (403, "failed quota: team: must specify limits.memory", UserError),
        (403, 'pods is forbidden: User "x" cannot create resource "pods"', UserError),
        (422, "spec.x: Invalid value", UserError),
        (429, "too many requests", StageFailedError),
        (500, "etcd is gone", StageFailedError),
    ],
)
def test_a_refused_pod_passes_on_what_the_cluster_says(status, message, kind):
    error = refused(status, message, "train", 1)
    assert type(error) is kind
    # A wait is shown again only if its words change: the pod's name changes at each try.
    words = message.partition(" is forbidden: ")[2] if kind is NoRoomError else message
    assert words in str(error)
    assert ('pods "x"' in str(error)) is ('pods "x"' in message and kind is not NoRoomError)


def test_pods_that_exceed_a_quota_together_are_refused():
    message = f"{QUOTA}=500m,pods=1, used: limits.cpu=1,pods=2, limited: limits.cpu=1,pods=5"
    assert type(refused(403, message, "train", 2)) is NoRoomError
    assert type(refused(403, message, "train", 3)) is UserError
