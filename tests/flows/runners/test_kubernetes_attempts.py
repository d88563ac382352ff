"""Pods of one attempt without a cluster: their logs, their ends, and what is left of them."""

import itertools
import json
from http.client import BAD_GATEWAY, INTERNAL_SERVER_ERROR, NOT_FOUND, OK, SERVICE_UNAVAILABLE
from http.server import BaseHTTPRequestHandler

import pytest
from kubernetes.client.exceptions import ApiException

from flows.pipeline.config import RunConfig
from flows.pipeline.placement import Execution, KubernetesSettings
from flows.runners.attempt_log import whole_lines
from flows.runners.choose import check_place
from flows.runners.ending import Ending, raise_for
from flows.runners.kubernetes import attempt
from flows.runners.kubernetes.attempt import PodAttempt
from flows.runners.kubernetes.client import Cluster, explain_api_errors
from flows.runners.kubernetes.diagnosis import STAGE
from flows.runners.kubernetes.place import KubernetesPlace
from flows.runners.place import PlaceAwayError
from stages.contract.errors import EXIT_USER, PreemptedError, UserError
from stages.contract.events import Failure
from stages.contract.request import Resources
from tests.flows.runners.stage_jobs import job_of
from tests.probe_stage import probe_request
from tests.scripted_server import served


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Looks at the pods again at once."""
    monkeypatch.setattr(attempt, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(attempt, "_CAUSE_SECONDS", 0.01)
    monkeypatch.setattr(attempt, "_EVENTS_SECONDS", 0.0)


@pytest.fixture
def request_(store):
    return probe_request(store, Resources(nodes=2))


def pod(name, code=None):
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
        ended: Name and exit code of a pod that has ended.
        later: Another one's, which ends when each watcher has looked once.
    """

    server = "here"

    def __init__(self, ended, *later):
        self.deleted = []
        self._codes = dict([ended])
        self._later = dict(later)

    def pods(self, selector):
        seen = [pod(name, self._codes.get(name)) for name in ("geb-x-0", "geb-x-1")]
        self._codes |= self._later
        return seen

    def log(self, name, since_seconds=None):
        return []

    def delete_pod(self, name):
        self.deleted.append(name)
        self._codes.setdefault(name, 143)


def work_of(request, cluster, **settings):
    execution = Execution(grace_seconds=5, kubernetes=KubernetesSettings(**settings))
    return PodAttempt(cluster, job_of(request), execution, "geb-x")


FAILED = Ending("failed", None, "node 2 of 2: ended by exit code 64")
KILLED = "node 2 of 2: ended by SIGKILL (the kernel does that when memory runs out)"


@pytest.mark.parametrize(
    ("ends", "ending", "deleted"),
    [
        # The first one saves what both have trained.
        ([("geb-x-1", 0), ("geb-x-0", 0)], Ending("exited", 0), []),
        ([("geb-x-1", 64)], FAILED, ["geb-x-0"]),
        # A killed pod is heard of later than the one that lost its connection to it.
        ([("geb-x-0", 1), ("geb-x-1", 137)], Ending("failed", None, KILLED), []),
    ],
)
def test_a_pod_that_fails_ends_the_others_once_the_cause_is_known(request_, ends, ending, deleted):
    cluster = Pods(*ends)
    assert work_of(request_, cluster).follow() == ending
    assert cluster.deleted == deleted


class Refusing(Pods):
    """Two pods, of which the second one prints why it refuses its request."""

    def log(self, name, since_seconds=None):
        failure = Failure(kind="user", message="too large", remedy="take a smaller batch")
        line = f"2026-01-01T00:00:00Z {failure.model_dump_json()}\n"
        return [line] if name == "geb-x-1" else []


def test_a_mistake_that_shows_on_another_node_keeps_its_remedy(request_):
    work = work_of(request_, Refusing(("geb-x-0", 1), ("geb-x-1", EXIT_USER)))
    ending = work.follow()
    with pytest.raises(UserError, match="too large") as caught:
        raise_for(ending, work._job.log, request_, stopped=False)
    assert caught.value.remedy == "take a smaller batch"


class Views(Pods):
    """Two pods, as they are seen time after time; the last view stays."""

    def __init__(self, *views):
        super().__init__(("", 0))
        self._views = list(views)

    def pods(self, selector):
        return self._views.pop(0) if len(self._views) > 1 else self._views[0]

    def last_events(self, name):
        return "Killing: Stopping container stage"


def deleted(name, code=143, *, ready="True"):
    """A deleted pod that has ended with an exit code, or not yet."""
    manifest = pod(name, code)
    manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    manifest["status"]["conditions"] = [{"type": "Ready", "status": ready}]
    return manifest


def never_started(name):
    """A pod whose node died while it fetched the image."""
    manifest = deleted(name, ready="False")
    manifest["status"]["containerStatuses"] = [{"state": {"waiting": {}}}]
    return manifest


def gated(name):
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"image": "geb-torch:1"}], "schedulingGates": [{"name": "queue"}]},
        "status": {"phase": "Pending", "conditions": [condition]},
    }


def follow_views(request, *views):
    return work_of(request, Views(*views), pending_seconds=0.005).follow()


def test_time_in_a_queue_does_not_count_as_a_pod_s_start(request_):
    queued = [gated("geb-x-0"), gated("geb-x-1")]
    ended = [pod("geb-x-0", 0), pod("geb-x-1", 0)]
    assert follow_views(request_, queued, queued, ended) == Ending("exited", 0)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (deleted("geb-x-1"), "deleted: Killing: Stopping container stage"),
        (deleted("geb-x-1", None, ready="False"), "does not answer"),
        (never_started("geb-x-1"), "its pod was deleted"),
    ],
    ids=["deleted", "lost", "lost before its start"],
)
def test_a_pod_that_somebody_else_deleted_was_taken(request_, second, message):
    ending = follow_views(request_, [pod("geb-x-0", 1), second])
    assert ending.kind == "preempted"
    assert message in ending.message


class Spot(Views):
    """Two pods; the second one's node is lost, and goes with its pod once we ask that to end."""

    def __init__(self):
        lost = deleted("geb-x-1", None, ready="False")
        del lost["metadata"]["deletionTimestamp"]
        super().__init__([pod("geb-x-0", 1), lost])

    def delete_pod(self, name):
        self._views = [[pod("geb-x-0", 1)]]


def test_a_lost_node_is_the_cause_although_its_pod_was_asked_to_end(request_):
    ending = work_of(request_, Spot()).follow()
    assert ending == Ending("preempted", None, "node 2 of 2: its node does not answer")


LINES = ["2026-01-01T00:00:00Z one\n", "2026-01-01T00:00:00.2Z two\n"]
SAME_TIME = [
    f"2026-01-01T00:00:0{at} {line}\n"
    for at, line in (("1Z", "one"), ("1Z", "two"), ("0Z", "late"))
]


def test_a_line_of_a_log_ends_at_a_newline_alone():
    chunks = ["a\u2028b\rc\nd".encode(), b"e\n", b"f"]
    assert list(whole_lines(chunks)) == ["a\u2028b\rc\n", "de\n", "f\n"]


class Busy(Pods):
    """Two pods that have ended, and an API server that gives some answers for their logs."""

    def __init__(self, *answers):
        super().__init__(("geb-x-0", 1), ("geb-x-1", 1))
        self._answers = list(answers)

    def log(self, name, since_seconds=None):
        answer = self._answers.pop(0) if name == "geb-x-0" else []
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([ApiException(INTERNAL_SERVER_ERROR), ConnectionResetError(), LINES], ["one", "two"]),
        ([ApiException(NOT_FOUND), LINES], []),
        # One time for all lines of a buffer, and a line that comes late.
        ([SAME_TIME], ["one", "two", "late"]),
    ],
    ids=["busy", "gone", "same time"],
)
def test_the_last_lines_are_asked_for_until_there_is_an_answer(request_, answers, expected):
    work = work_of(request_, Busy(*answers))
    work.follow()
    assert list(work._job.log.lines) == expected


class Proxy(BaseHTTPRequestHandler):
    """Answers with its own page."""

    status = OK

    def do_GET(self):
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"<html>Please sign in</html>")

    do_POST = do_GET


@pytest.fixture
def behind_proxy(tmp_path, monkeypatch):
    """Settings of a cluster whose every answer is a proxy's."""
    with served(Proxy) as url:
        config = {
            "clusters": [{"name": "behind", "cluster": {"server": url}}],
            "contexts": [{"name": "behind", "context": {"cluster": "behind", "user": "me"}}],
            "current-context": "behind",
            "users": [{"name": "me", "user": {}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(path))
        volumes = {str(tmp_path): {"claim": "store"}}
        settings = KubernetesSettings(user="1000:1000", volumes=volumes)
        yield Execution(runner="kubernetes", kubernetes=settings)


@pytest.mark.parametrize(("status", "word"), [(OK, "not JSON"), (BAD_GATEWAY, "Bad Gateway")])
def test_a_proxy_s_page_is_not_an_answer_of_the_cluster(
    request_, behind_proxy, monkeypatch, status, word
):
    monkeypatch.setattr(Proxy, "status", status)
    with pytest.raises(PreemptedError, match=word):
        KubernetesPlace(behind_proxy).find(job_of(request_))


def test_a_cluster_that_starts_again_holds_up_a_stage_but_no_check(
    behind_proxy, store, monkeypatch
):
    monkeypatch.setattr(Proxy, "status", SERVICE_UNAVAILABLE)
    check_place(RunConfig(store=store.location, execution=behind_proxy), {"train"})
    cluster = Cluster(behind_proxy.kubernetes)
    container = {"name": "stage", "image": "geb-torch:1"}
    manifest = {"metadata": {"labels": {STAGE: "train"}}, "spec": {"containers": [container]}}
    with pytest.raises(PlaceAwayError, match="Service Unavail"), explain_api_errors(cluster):
        cluster.create(manifest, 1)


@pytest.mark.parametrize(
    "spec",
    [{"nodeSelector": {"gpu": True}}, {"imagePullSecrets": ["registry"]}, {"tolerations": "all"}],
    ids=lambda spec: next(iter(spec)),
)
def test_a_pod_that_cannot_be_is_the_user_s_mistake(behind_proxy, spec):
    container = {"name": "stage", "image": "geb-torch:1"}
    manifest = {
        "metadata": {"labels": {STAGE: "train"}},
        "spec": {"containers": [container], **spec},
    }
    with pytest.raises(UserError, match=next(iter(spec))) as refusal:
        Cluster(behind_proxy.kubernetes).create(manifest, 1)
    assert "execution.kubernetes" in refusal.value.remedy


@pytest.mark.parametrize("text", ["{", "", "contexts: []"])
def test_a_damaged_configuration_of_a_cluster_is_a_person_s_mistake(tmp_path, monkeypatch, text):
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(UserError, match="no cluster is configured") as caught:
        Cluster(KubernetesSettings())
    assert "set KUBECONFIG" in caught.value.remedy


def test_a_line_that_never_ends_is_handed_on():
    bar = b"\r 50%" * 1000
    endless = itertools.chain(itertools.repeat(bar, 1000), [b"the end"])
    assert len(list(whole_lines(endless))) > 1
