"""Diagnosis of a pod by its state, without a cluster."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from urllib3.exceptions import HTTPError

from flows.runners.attempt_log import AttemptLog
from flows.runners.ending import Ending, raise_for
from flows.runners.kubernetes.client import explain_api_errors
from flows.runners.kubernetes.diagnosis import (
    ending_of,
    refused,
)
from flows.runners.place import NoRoomError
from stages.contract.errors import PreemptedError, StageFailedError, UserError
from stages.contract.events import Failure
from stages.contract.request import Resources, make_request
from stages.train.params import TrainParams
from tests.stage_calls import stand_ins


def pod(phase, *, state=None, conditions=(), **status):
    containers = [] if state is None else [{"name": "stage", "state": state}]
    return {
        "metadata": {"name": "geb-x-0"},
        "spec": {"containers": [{"image": "geb-torch:1"}]},
        "status": {
            "phase": phase,
            "containerStatuses": containers,
            "conditions": list(conditions),
            **status,
        },
    }


def terminated(code, reason="Error", **status):
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return pod("Failed" if code else "Succeeded", state=state, **status)


def disruption(kind, reason, message):
    return {"type": kind, "status": "True", "reason": reason, "message": message}


def disrupted(kind, reason, message):
    return terminated(143, conditions=(disruption(kind, reason, message),))


@pytest.mark.parametrize(
    ("state", "kind", "said"),
    [
        (terminated(64), "exited", ""),
        (terminated(143), "preempted", "asked to end"),
        (terminated(255, "Unknown"), "preempted", "node"),
        (terminated(137, "OOMKilled"), "out_of_memory", ""),
        (
            pod(
                "Failed",
                conditions=(
                    disruption("DisruptionTarget", "TerminationByKubelet", "low on memory"),
                ),
                reason="Evicted",
                message="The node was low on resource: memory.",
            ),
            "preempted",
            "TerminationByKubelet: low on memory",
        ),
        (
            pod(
                "Failed",
                reason="Evicted",
                message='Usage of EmptyDir "tmp" exceeds the limit "1Mi"',
            ),
            "failed",
            "exceeds the limit",
        ),
        (pod("Failed", reason="NodeLost"), "preempted", "NodeLost"),
        (pod("Failed", reason="OutOfcpu", message="Pod was rejected"), "preempted", "OutOfcpu"),
        (terminated(128, "StartError"), "refused", ""),
        (
            disrupted("DisruptionTarget", "PreemptionByScheduler", "for a pod"),
            "preempted",
            "PreemptionByScheduler: for a pod",
        ),
        (
            disrupted("TerminationTarget", "StoppedByKueue", "Preempted for a Workload"),
            "preempted",
            "StoppedByKueue: Preempted",
        ),
    ],
)
def test_each_end_of_a_pod_has_its_meaning(state, kind, said):
    ending = ending_of(state)
    assert ending.kind == kind
    assert said in ending.message


def test_an_api_server_that_is_away_uses_up_no_retry():
    cluster = SimpleNamespace(server="https://cluster")
    with pytest.raises(PreemptedError, match="not answer"), explain_api_errors(cluster):
        raise HTTPError("connection refused")


def test_a_pod_at_work_has_not_ended():
    assert ending_of(pod("Running", state={"running": {}})) is None


PARAMS = TrainParams()
REQUEST = make_request(
    PARAMS, inputs=stand_ins(PARAMS), seed=0, store="store", resources=Resources(memory_gib=4)
)


def error_of(ending, *, stopped=False, failure=None):
    log = AttemptLog(Path("stage.log"), io.StringIO())
    log.failure = failure
    with pytest.raises(BaseException) as caught:
        raise_for(ending, log, REQUEST, stopped=stopped)
    return caught.value


@pytest.mark.parametrize(
    ("ending", "kind", "said"),
    [
        (Ending("preempted", 143, "preempted"), PreemptedError, "preempted"),
        (Ending("out_of_memory", 137), StageFailedError, ".memory_gib=4"),
        (Ending("exited", 137), StageFailedError, "SIGKILL"),
    ],
    ids=lambda each: getattr(each, "kind", ""),
)
def test_an_ending_becomes_an_error_that_names_the_log(ending, kind, said):
    error = error_of(ending)
    assert type(error) is kind
    assert said in str(error)
    assert "stage.log" in str(error)


QUOTA = 'pods "x" is forbidden: exceeded quota: team, requested: limits.cpu'
LIMITS = "limits.cpu=1,pods=3"


@pytest.mark.parametrize("stopped", [True, False])
def test_a_mistake_comes_before_everything(stopped):
    failure = Failure(kind="user", message="bad value", remedy="use 8")
    error = error_of(Ending("exited", 64), stopped=stopped, failure=failure)
    assert isinstance(error, UserError)
    assert error.remedy == "use 8"


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
