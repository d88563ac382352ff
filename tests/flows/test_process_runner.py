"""The process runner with real subprocesses: exit codes, events, time limits, dead-man switch."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from stages.contract.errors import StageFailedError, StoppedError, UserError
from stages.contract.events import Event, Log, Progress
from stages.contract.request import Request, Resources
from stages.store.base import Store
from tests.at_work import at_work
from tests.flows.probes import alive, gone, wait_until
from tests.orchestrators import orchestrator
from tests.probe_requests import probe_request

pytestmark = pytest.mark.usefixtures("probe_stage")


@pytest.fixture(params=[True, False], ids=["forked", "started"], autouse=True)
def fork_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True where stages are forks of a fork server."""
    execution = partial(Execution, fork_server=request.param)
    monkeypatch.setattr(sys.modules[__name__], "Execution", execution)
    return bool(request.param)


def run(store: Store, request: Request, grace_seconds: float = 30.0) -> list[Event]:
    heard: list[Event] = []
    runner = make_runner(Execution(grace_seconds=grace_seconds))
    runner.run(request, heard.append)
    return heard


@pytest.mark.parametrize(
    ("own", "name", "value"),
    [
        ({}, "GOMP_SPINCOUNT", "1000"),
        ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT", "77"),
        ({"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY", "active"),
        ({"OMP_WAIT_POLICY": "active"}, "GOMP_SPINCOUNT", "None"),
    ],
)
def test_threads_of_a_stage_do_not_spin_for_long_unless_a_person_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, own: dict[str, str], name: str, value: str
) -> None:
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(each, raising=False)
    for each, wanted in own.items():
        monkeypatch.setenv(each, wanted)
    heard = run(store, probe_request(store, behaviour="tell_environment", message=name))
    assert f"{name} is {value}" in [each.message for each in heard if isinstance(each, Log)]


def test_packages_where_the_user_stands_are_not_executed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stages", "flows", "pyarrow", "json"):
        package = tmp_path / "mine" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path / "mine")
    request = probe_request(store)
    run(store, request)
    assert store.load("probe", request.key) is not None
    assert not (tmp_path / "executed").exists()


def test_a_stage_that_ends_well_leaves_its_artifact_its_events_and_its_log(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    request = probe_request(store, message="hello", prints="noise from a library")
    heard = run(store, request)
    assert store.load("probe", request.key) is not None
    assert any(isinstance(each, Log) and each.message == "hello" for each in heard)
    assert any(isinstance(each, Progress) for each in heard)
    assert not any("noise" in each.model_dump_json() for each in heard)
    [log] = store.log_path("probe", request.key).glob("*.log")
    assert "noise from a library" in log.read_text()


def test_exit_code_64_is_the_user_s_mistake_with_its_remedy(store: Store) -> None:
    with pytest.raises(UserError, match="bad value 7") as caught:
        run(store, request := probe_request(store, behaviour="refuse"))
    assert caught.value.remedy == "use 8"
    [log] = store.log_path("probe", request.key).glob("*.log")
    assert log.read_text().endswith("[error] bad value 7\nremedy: use 8\n")
    assert list(store.artifacts()) == []


def test_a_crash_and_a_kill_are_named_and_keep_the_last_lines(store: Store) -> None:
    with pytest.raises(StageFailedError, match=r"SIGKILL.*memory"):
        run(store, probe_request(store, behaviour="kill_self"))
    with pytest.raises(StageFailedError, match="RuntimeError: boom") as caught:
        run(store, probe_request(store, behaviour="crash"))
    assert any("Traceback" in line for line in caught.value.last_lines)
    assert list(store.artifacts()) == []


def test_a_stage_that_takes_too_long_is_ended(store: Store) -> None:
    request = probe_request(store, Resources(timeout_seconds=1.0), behaviour="hang")
    with pytest.raises(StageFailedError, match="timeout_seconds=1"):
        run(store, request)
    assert store.lease("probe", request.key).holder() is None


@pytest.mark.parametrize("behaviour", ["hang", "ignore_sigterm", "leave_child"])
def test_stop_all_leaves_no_process_behind(store: Store, behaviour: str) -> None:
    runner = make_runner(Execution(grace_seconds=1.0))
    with at_work(probe_request(store, behaviour=behaviour), runner) as work:
        runner.stop_all()
        assert isinstance(work.join(), StoppedError)
        assert not any(alive(pid) for pid in work.pids)
    assert list(store.artifacts()) == []


def test_a_stage_whose_events_nobody_can_hear_any_more_is_ended(store: Store) -> None:
    pids: list[int] = []

    def hear(event: Event) -> None:
        if isinstance(event, Log) and event.message.startswith("pids "):
            pids.extend(int(each) for each in event.message.split()[1:])
            raise ConnectionError("the listener is gone")

    limited = Resources(timeout_seconds=600.0)
    with pytest.raises(ConnectionError):
        make_runner(Execution(grace_seconds=1)).run(
            probe_request(store, limited, behaviour="leave_child"), hear
        )
    assert pids
    assert not any(alive(pid) for pid in pids)


def test_killing_the_orchestrator_ends_its_stage(store: Store, fork_server: bool) -> None:
    execution = Execution(grace_seconds=1, fork_server=fork_server)
    with orchestrator(probe_request(store, behaviour="leave_child"), execution) as (_, pids):
        assert pids
        assert all(alive(pid) for pid in pids)
    assert all(gone(pid) for pid in pids)


def test_a_stage_outlives_its_orchestrator_for_long_enough_to_save(
    store: Store, tmp_path: Path, fork_server: bool
) -> None:
    saved = tmp_path / "saved"
    request = probe_request(store, behaviour="save_when_stopped", path=str(saved))
    with orchestrator(request, Execution(fork_server=fork_server), until='"metric"'):
        pass
    [log] = store.log_path(request.stage, request.key).glob("*.log")
    wait_until(lambda: "[stopped] asked to stop (SIGTERM)\n" in log.read_text())
    assert saved.read_text() == "saved"
    lines = log.read_text().splitlines()
    for number in (0, 4999):
        assert f"line {number} before the end" in lines
        assert f"[info] message {number} before the end" in lines
    # The orchestrator may have read the first half of one.
    assert sum("metric" in line for line in lines) <= 1


def test_a_daemon_that_outlives_the_supervisor_is_not_waited_for(
    store: Store, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    try:
        with pytest.raises(StageFailedError):
            run(store, probe_request(store, behaviour="leave_daemon", path=str(pid)))
        assert alive(int(pid.read_text()))
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_missing_interpreter_is_named_with_its_remedy(store: Store) -> None:
    runner = make_runner(Execution(interpreters={"probe": "/nowhere/python"}))
    with pytest.raises(UserError, match="/nowhere/python") as caught:
        runner.run(probe_request(store), lambda event: None)
    assert "setup-vllm" in caught.value.remedy
