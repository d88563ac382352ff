"""Stages as forks of a server that has loaded their libraries."""

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from flows.runners.local import fork_client, process
from stages.contract.errors import StageFailedError, StoppedError
from tests.at_work import at_work
from tests.flows.loop import write_program
from tests.probe_stage import probe_request

pytestmark = pytest.mark.usefixtures("probe_stage")

GRACE = 20.0


def hanging(store, message):
    return probe_request(store, behaviour="hang", message=message)


def stage_of(work):
    return psutil.Process(work.pids[0])


def server_of(work):
    supervisor = stage_of(work).parent()
    return supervisor.parent()


def test_stages_of_several_runners_are_forks_of_one_server(store):
    with (
        at_work(hanging(store, "one"), make_runner(Execution())) as one,
        at_work(hanging(store, "two"), make_runner(Execution())) as two,
    ):
        assert server_of(one) == server_of(two)
        assert "stages.harness.fork_server" in server_of(one).cmdline()


def test_forks_draw_other_random_numbers(store):
    events = []
    for message in ("one", "two"):
        request = probe_request(store, behaviour="draw", message=message)
        make_runner(Execution()).run(request, events.append)
    drawn = [event.message for event in events if getattr(event, "message", "").startswith("drawn")]
    assert len(set(drawn)) == 2


def test_a_stage_outlives_its_server_and_the_next_one_gets_another(store):
    with at_work(hanging(store, "one"), runner := make_runner(Execution())) as one:
        stage, server = stage_of(one), server_of(one)
        server.kill()
        psutil.wait_procs([server])
        with at_work(hanging(store, "two"), make_runner(Execution())) as two:
            assert server_of(two) != server
        assert stage.is_running()
        runner.stop_all()
        assert isinstance(one.join(), StoppedError)
        assert not stage.is_running()


def test_an_interpreter_that_cannot_start_tells_its_own_words(store, tmp_path, monkeypatch):
    broken = write_program(tmp_path / "python", "echo this environment is broken >&2\nexit 3")
    runner = make_runner(Execution(interpreters={"probe": str(broken)}))

    class Ended(subprocess.Popen[Any]):
        """A program that has ended before it is asked for a start."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.wait()

    for started in (subprocess.Popen, Ended, Ended):
        monkeypatch.setattr(fork_client.subprocess, "Popen", started)
        with pytest.raises(StageFailedError, match="this environment is broken"):
            runner.run(probe_request(store), lambda event: None)


def test_a_server_that_is_starting_is_ended_at_once(store, tmp_path):
    sign = tmp_path / "asked"
    os.mkfifo(sign)
    hanging = write_program(tmp_path / "python", f"echo asked > {sign}\nexec sleep 1000")
    runner = make_runner(Execution(interpreters={"probe": str(hanging)}, grace_seconds=GRACE))
    with ThreadPoolExecutor() as pool:
        run = pool.submit(runner.run, probe_request(store), lambda event: None)
        sign.read_text()
        began = time.monotonic()
        runner.stop_all()
        assert time.monotonic() - began < GRACE
        with pytest.raises(StoppedError):
            run.result()
    # The next one, of another run of this process, asks another server, which says how it ends.
    hanging.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(StageFailedError, match="printed nothing"):
        make_runner(Execution(interpreters={"probe": str(hanging)})).run(
            probe_request(store), lambda event: None
        )


def test_a_starting_server_stays_while_another_stage_waits(tmp_path):
    sign = tmp_path / "asked"
    os.mkfifo(sign)
    hanging = write_program(tmp_path / "python", f"echo $$ > {sign}\nexec sleep 1000")
    with (tmp_path / "log").open("w") as log:
        first, second = (
            fork_client.start_forked([str(hanging)], os.environ, log.fileno()) for _ in range(2)
        )
    with first, second:
        server = psutil.Process(int(sign.read_text()))
        first.end()
        assert server.is_running()
        second.end()
        assert not server.is_running()


def test_a_stuck_supervisor_is_killed_after_the_grace_period(store, monkeypatch):
    monkeypatch.setattr(process, "SUPERVISOR_SECONDS", 0.0)
    runner = make_runner(Execution(grace_seconds=0.1))
    with at_work(hanging(store, "one"), runner) as work:
        supervisor = stage_of(work).parent()
        supervisor.suspend()
        runner.stop_all()
        assert isinstance(work.join(), StoppedError)
