"""A run that was started in a terminal, as Prefect shows it."""

import logging

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterName,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.context import refresh_global_settings_context

from flows.execution.observer import Session
from flows.execution.plan import plan
from flows.execution.run_record import RunRecord
from flows.iterate import iterate, run_as_flow
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.loading import load_config
from flows.report.summary import summarise
from stages.contract.errors import UserError
from stages.store.opening import open_store
from tests.flows.loop import ROOT, geb, write_config, write_program

pytestmark = pytest.mark.slow


def test_a_failed_run_shows_its_last_lines_and_resume_command(prefect_server, tmp_path):
    failing = write_program(
        tmp_path / "failing-python", "echo 'the disk fell out'\necho so\nexit 7"
    )
    execution = {"interpreters": {"prepare": str(failing)}, "fork_server": False}
    done = geb("run", write_config(tmp_path, name="terminal", execution=execution))
    assert done.returncode == 1, done.stderr
    assert "the disk fell out" in done.stderr
    named = FlowRunFilter(name=FlowRunFilterName(any_=["terminal"]))
    with SyncPrefectClient(prefect_server) as client:
        [run] = client.read_flow_runs(flow_run_filter=named)
        assert client.read_flow(run.flow_id).name == iterate.name
        key = ArtifactFilterKey(any_=["terminal-failure"])
        [shown] = client.read_artifacts(artifact_filter=ArtifactFilter(key=key))
        of_run = LogFilterFlowRunId(any_=[run.id])
        log = client.read_logs(LogFilter(flow_run_id=of_run))
    of_task = [line.message for line in log if line.task_run_id and line.level >= logging.ERROR]
    assert any("the disk fell out" in line for line in of_task)
    assert not any("NotReady" in line for line in of_task), "only the cause is an error"
    assert run.name == "terminal"
    assert "the disk fell out" in str(shown.data)
    assert run.state.is_failed()
    message = str(run.state.message)
    assert f"geb resume terminal --store {tmp_path / 'store'}" in message
    assert "Retry" not in message, "Prefect has no deployment to start it with"


def test_a_step_ends_well_while_a_table_s_source_is_set_aside(prefect_server, copied, monkeypatch):
    calls = []

    def set_aside_once(record):
        calls.append(record)
        if len(calls) == 1:
            raise FileNotFoundError(2, "No such file or directory")
        return summarise(record)

    monkeypatch.setattr("flows.iterate.summarise", set_aside_once)
    refresh_global_settings_context()
    assert run_as_flow(resolve_run(load_config(copied)), Session()).summary.checkpoint
    assert len(calls) == 2, "after the only iteration, and at the end"


def test_an_interrupted_run_goes_on_computing_again(prefect_server, copied, monkeypatch):
    config = load_config(copied)
    refresh_global_settings_context()

    def fail(*_):
        raise UserError("no luck today", "try again")

    with monkeypatch.context() as patched, pytest.raises(UserError, match="no luck"):
        patched.setattr("flows.execution.step_executor.build_request", fail)
        run_as_flow(resolve_run(config, "iteration-1/train"), Session())
    lines = {line.step: line for line in plan(resolve_run(config))}
    assert lines["iteration-1/pair"].action == "reuse"
    assert lines["iteration-1/train"].because == "its artifact is gone"
    assert lines["iteration-1/evaluate"].action == "run"
    record = RunRecord(open_store(config.store), config.name)
    states = {step.step: step.state for step in record.steps()}
    assert states["iteration-1/evaluate"] == "outdated"
    assert "outdated" not in (states["iteration-1/pair"], states["base/generate/0"])
    assert summarise(record).rows


def test_a_run_refused_before_its_record_offers_no_resume(prefect_server, tmp_path):
    oracle = tmp_path / "broken.py"
    oracle.write_text("def score(prompts, responses, references):\n    return []\n")
    changes = ["name=refused", f"store={tmp_path / 'store'}", f"inputs.oracle_code={oracle}"]
    config = load_config(ROOT / "configs/quickstart.yaml", changes)
    refresh_global_settings_context()
    with pytest.raises(UserError, match="returned 0 scores"):
        run_as_flow(resolve_run(config), Session())
    assert not (tmp_path / "store/runs/refused").exists()
    with SyncPrefectClient(prefect_server) as client:
        key = ArtifactFilterKey(any_=["refused-failure"])
        [artifact] = client.read_artifacts(artifact_filter=ArtifactFilter(key=key))
    assert "returned 0 scores" in str(artifact.data)
    assert "geb resume" not in str(artifact.data)
