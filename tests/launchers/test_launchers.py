"""Tests of every launcher: a stage starts, ends, stops, fails, loses its machine, is taken over."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flows.runners.local.gpus import hold_gpus
from flows.runners.place import PlaceNotice
from stages.contract.errors import PreemptedError, StageFailedError, StoppedError, UserError
from stages.contract.events import Log, Progress
from stages.contract.request import Resources
from tests.at_work import at_work, hangs, said
from tests.flows.loop import geb_ok, geb_refused, plan, result_digests, write_config
from tests.flows.probes import alive, hanging_pids, wait_until
from tests.launchers.launcher import RESOURCES, logs_of
from tests.orchestrators import orchestrator

LAUNCHERS = {
    "process": (),
    "fork server": (),
    "docker": (pytest.mark.docker, pytest.mark.slow),
    "slurm": (pytest.mark.slurm, pytest.mark.slow),
    "kubernetes": (pytest.mark.kubernetes, pytest.mark.slow),
}


def launched_by(*names):
    """Runs a test with these launchers, each with its marks."""
    params = [pytest.param(name, marks=LAUNCHERS[name]) for name in names]
    return pytest.mark.parametrize("launcher", params, indirect=True, scope="module")


def pytest_generate_tests(metafunc):
    """Runs every other test with all launchers."""
    marks = metafunc.definition.iter_markers("parametrize")
    if all(mark.args[0] != "launcher" for mark in marks):
        params = [pytest.param(name, marks=marks) for name, marks in LAUNCHERS.items()]
        metafunc.parametrize("launcher", params, indirect=True, scope="module")


def test_a_stage_that_ends_well_leaves_artifact_events_and_log(launcher, store, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    request = launcher.request(store, message="hello", prints="noise from a library")
    heard = launcher.run(request)
    artifact = store.load("probe", request.key)
    assert (artifact.path / "result.txt").read_text() == "seed 0 hello"
    assert heard.count(Log(message="hello")) == 1
    assert heard.count(Progress(done=0, total=1, unit="things")) == 1
    assert not any("noise" in event.model_dump_json() for event in heard)
    [log] = store.log_path("probe", request.key).glob("*.log")
    assert "noise from a library" in log.read_text()
    assert not store.work_path("probe", request.key).exists()


def test_exit_code_64_is_the_user_s_mistake_with_its_remedy(launcher, store):
    request = launcher.request(store, behaviour="refuse")
    with pytest.raises(UserError, match="bad value 7") as caught:
        launcher.run(request)
    assert caught.value.remedy == "use 8"
    assert "[error] bad value 7\nremedy: use 8\n" in logs_of(request)
    assert list(store.artifacts()) == []


def test_a_crash_keeps_the_last_lines(launcher, store):
    with pytest.raises(StageFailedError, match="RuntimeError: boom") as caught:
        launcher.run(launcher.request(store, behaviour="crash"))
    assert not isinstance(caught.value, PreemptedError)
    assert any("Traceback" in line for line in caught.value.last_lines)
    assert list(store.artifacts()) == []


def test_a_kill_is_named(launcher, store):
    with pytest.raises(StageFailedError, match=r"SIGKILL.*when memory runs out") as caught:
        launcher.run(launcher.request(store, behaviour="kill_self"))
    assert not isinstance(caught.value, PreemptedError)
    assert "memory_gib" not in str(caught.value)


@launched_by("docker", "kubernetes")
def test_a_stage_out_of_memory_names_the_limit_and_the_setting(launcher, store):
    request = launcher.request(store, Resources(memory_gib=0.25), behaviour="eat_memory")
    with pytest.raises(StageFailedError, match=r"resources\.probe\.memory_gib=0\.25"):
        launcher.run(request)


def test_a_stage_that_can_never_start_is_a_mistake(launcher, store):
    mistake = launcher.mistake
    with pytest.raises(UserError, match=mistake.words) as caught:
        launcher.run(launcher.request(store), **mistake.settings)
    assert mistake.remedy in caught.value.remedy


@launched_by("process", "slurm", "kubernetes")
def test_plan_and_run_refuse_what_the_place_would_refuse(launcher, store, tmp_path):
    for changes, resources, words in launcher.refused:
        execution = launcher.section(launcher.request(store), **changes)
        config = write_config(tmp_path, execution=execution, resources=RESOURCES | resources)
        for command in ("plan", "run"):
            assert words in geb_refused(command, config)
    assert list(store.artifacts()) == []


@launched_by("process", "fork server", "slurm")
@pytest.mark.parametrize(("gpus", "seen"), [(0, ""), (2, "0,1")])
def test_a_stage_sees_its_gpus_and_no_other(launcher, store, tmp_path, monkeypatch, gpus, seen):
    monkeypatch.setenv("GEB_GPUS", "0,1")
    monkeypatch.setenv("GEB_GPU_LOCKS", str(tmp_path / "locks"))
    request = launcher.request(store, Resources(gpus=gpus, cpus=1), behaviour="tell_place")
    assert f"worker None, GPUs {seen!r}" in said(launcher.run(request))


def test_a_stage_that_waits_for_its_place_is_taken_back(launcher, store, tmp_path, monkeypatch):
    monkeypatch.setenv("GEB_GPUS", "0")
    monkeypatch.setenv("GEB_GPU_LOCKS", str(tmp_path / "locks"))
    request = launcher.request(store, Resources(gpus=1))
    runner = launcher.runner(request, **launcher.waits)

    def waits(event):
        return isinstance(event, PlaceNotice) and event.waits

    with hold_gpus(1), at_work(request, runner, waits) as work:
        runner.stop_all()
        assert isinstance(work.join(), StoppedError)
    launcher.await_end(request, [])


def test_two_stages_run_at_once_and_stop_together(launcher, store):
    one, two = [launcher.request(store, behaviour="hang", message=name) for name in ("one", "two")]
    runner = launcher.runner(one)
    with at_work(one, runner) as first, at_work(two, runner) as second:
        runner.stop_all()
        assert isinstance(first.join(), StoppedError)
        assert isinstance(second.join(), StoppedError)


def test_a_stage_that_takes_too_long_is_ended(launcher, store):
    request = launcher.request(store, Resources(timeout_seconds=1.0), behaviour="hang")
    with pytest.raises(StageFailedError, match="timeout_seconds=1"):
        launcher.run(request, grace_seconds=30)
    # A cluster reports the limit before the stage has ended.
    wait_until(lambda: store.lease("probe", request.key).holder() is None)


@pytest.mark.parametrize(
    ("behaviour", "grace_seconds"), [("ignore_sigterm", 1), ("save_when_stopped", 60)]
)
def test_a_stopped_stage_saves_and_leaves_no_process(launcher, store, behaviour, grace_seconds):
    request = launcher.request(store, behaviour=behaviour)
    runner = launcher.runner(request, grace_seconds=grace_seconds)
    with at_work(request, runner) as work:
        runner.stop_all()
        assert isinstance(work.join(), StoppedError)
        launcher.await_end(request, work.pids)
    assert list(store.artifacts()) == []
    wait_until(lambda: store.lease("probe", request.key).holder() is None)
    saved = store.work_path("probe", request.key) / "saved"
    assert saved.exists() is (behaviour == "save_when_stopped")


def test_a_stage_whose_events_nobody_can_hear_any_more_is_ended(launcher, store):
    request = launcher.request(store, Resources(timeout_seconds=600), behaviour="leave_child")

    def hear(event):
        if hangs(event):
            raise ConnectionError("the listener is gone")

    with pytest.raises(ConnectionError):
        launcher.runner(request, grace_seconds=1).run(request, hear)
    launcher.await_end(request, hanging_pids(store.root))


def test_packages_where_the_user_stands_are_not_executed(launcher, store, tmp_path, monkeypatch):
    for name in ("stages", "flows", "pyarrow", "json"):
        package = tmp_path / "mine" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path / "mine")
    request = launcher.request(store)
    launcher.run(request)
    assert store.load("probe", request.key) is not None
    assert not (tmp_path / "executed").exists()


def test_a_stage_gets_no_secret_of_prefect(launcher, store, monkeypatch):
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    request = launcher.request(store, behaviour="tell_environment", message="PREFECT_API_KEY")
    assert "PREFECT_API_KEY is None" in said(launcher.run(request))


@launched_by("docker", "slurm", "kubernetes")
def test_a_stage_has_the_variables_of_the_settings_alone(launcher, store, monkeypatch):
    monkeypatch.setenv("GEB_WORKER", "secret")
    for values, worker in (({}, None), ({"GEB_WORKER": "node"}, "node")):
        request = launcher.request(store, behaviour="tell_place", message=str(worker))
        lines = said(launcher.run(request, **launcher.variables(values)))
        assert any(line.startswith(f"worker {worker}, ") for line in lines)


def test_a_stage_that_loses_its_machine_goes_on_at_the_next_try(launcher, store):
    request = launcher.request(store, behaviour="hang_once")
    kind, words = launcher.loss
    with at_work(request, launcher.runner(request)) as work:
        assert store.lease("probe", request.key).holder() is not None
        launcher.take_machine(work)
        error = work.join()
    assert type(error) is kind
    assert words in str(error)
    assert store.lease("probe", request.key).holder() is None
    launcher.run(request)
    assert store.load("probe", request.key) is not None


def test_a_stage_saves_after_its_orchestrator_and_the_next_goes_on(launcher, store):
    request = launcher.request(store, behaviour="save_when_stopped")
    execution = launcher.execution(request, grace_seconds=60)
    with orchestrator(request, execution, until='"metric"') as (_, pids):
        assert pids
    launcher.await_end(request, pids)
    assert (store.work_path("probe", request.key) / "saved").read_text() == "saved"
    heard = launcher.run(request)
    assert store.load("probe", request.key) is not None
    assert not any("taking over" in line for line in said(heard))


@launched_by("slurm", "kubernetes")
def test_a_stage_that_is_kept_is_taken_over_by_the_next_orchestrator(launcher, store):
    assert_taken_over(launcher, store, death="keep")


@launched_by("slurm")
def test_a_job_is_taken_over_before_it_stops(launcher, store):
    assert_taken_over(launcher, store, death="stop")


def assert_taken_over(launcher, store, death):
    request = launcher.request(store, behaviour="hang")
    with orchestrator(request, launcher.execution(request, death=death)) as (_, pids):
        pass
    runner = launcher.runner(request, death=death)
    with at_work(request, runner) as work:
        assert said(work.heard)[0].startswith("taking over ")
        assert work.pids == pids, "its events are heard from the beginning"


def test_a_second_orchestrator_waits_and_computes_nothing_again(launcher, store):
    request = launcher.request(store)
    waits = threading.Event()
    heard = []

    def hear_second(event):
        heard.append(event)
        if "looks after it" in str(event):
            waits.set()

    def hear_first(event):
        if not seconds:
            seconds.append(pool.submit(launcher.runner(request).run, request, hear_second))
            assert waits.wait(60)

    seconds = []
    with ThreadPoolExecutor() as pool:
        launcher.runner(request).run(request, hear_first)
    seconds[0].result()
    assert said(heard)[-1] == "another run has computed it"
    assert len(list(store.log_path("probe", request.key).glob("*.log"))) == 1


def test_a_stage_waits_while_another_one_computes_its_key(launcher, store):
    request = launcher.request(store)
    lease = store.lease("probe", request.key)
    lease.acquire()
    waited = []

    def hear(event):
        if "is being computed by" in str(event) and not waited:
            waited.append(event)
            lease.release()

    launcher.runner(request).run(request, hear)
    assert waited
    assert store.load("probe", request.key) is not None


@launched_by("slurm", "kubernetes")
def test_the_loop_gives_the_artifacts_of_processes(launcher, store, finished, tmp_path):
    config = write_config(
        tmp_path,
        execution=launcher.section(launcher.request(store)) | {"parallel": 2},
        resources=RESOURCES,
    )
    geb_ok("run", config)
    assert result_digests(store.root) == result_digests(finished.parent / "store")
    planned = plan(config, "--runner", "process")
    assert {step["action"] for step in planned.values()} == {"reuse"}, "processes find it all"


@launched_by("process", "fork server")
def test_an_event_that_a_library_prints_is_not_heard(launcher, store):
    line = Log(message="printed").model_dump_json()
    assert "printed" not in said(launcher.run(launcher.request(store, prints=line)))


@launched_by("process", "fork server")
def test_a_daemon_that_outlives_the_supervisor_is_not_waited_for(launcher, store, tmp_path):
    pid = tmp_path / "pid"
    try:
        with pytest.raises(StageFailedError):
            launcher.run(launcher.request(store, behaviour="leave_daemon", path=str(pid)))
        assert alive(int(pid.read_text()))
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@launched_by("process", "fork server")
@pytest.mark.parametrize("chosen", [None, "77"])
def test_threads_of_a_stage_do_not_spin_unless_a_person_says_so(
    launcher, store, monkeypatch, chosen
):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if chosen:
        monkeypatch.setenv("GOMP_SPINCOUNT", chosen)
    request = launcher.request(store, behaviour="tell_environment", message="GOMP_SPINCOUNT")
    assert f"GOMP_SPINCOUNT is {chosen or 1000}" in said(launcher.run(request))
