"""Slurm jobs without a cluster: options, batch programs, what Slurm says and what it means."""

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flows.pipeline.placement import Execution, SlurmSettings
from flows.runners.attempt_log import AttemptLog
from flows.runners.ending import raise_for
from flows.runners.place import PlaceAwayError, work_name
from flows.runners.slurm import client
from flows.runners.slurm.job import batch_program, default_interpreter, submit_options
from flows.runners.slurm.submission import check_job, is_hopeless, may_pass
from flows.runners.slurm.work import Status, ending_of, folders_for, jobs_folder, status_of
from stages.contract.errors import (
    EXIT_STOPPED,
    PreemptedError,
    RefusedError,
    StageFailedError,
    UserError,
)
from stages.contract.request import Resources
from tests.probe_stage import probe_request
from tests.programs import run_program


def test_settings_of_a_stage_override_the_general_ones():
    settings = SlurmSettings.model_validate(
        {
            "partition": "gpu",
            "time_limit": "4:00:00",
            "environment": {"A": "1"},
            "stages": {"pair": {"partition": "cpu", "environment": {"B": "2"}}},
        }
    )
    # A resumed run has its settings from its record.
    recorded = SlurmSettings.model_validate_json(settings.model_dump_json())
    for source in (settings, recorded):
        pair, train = source.job("pair"), source.job("train")
        assert (pair.partition, pair.time_limit) == ("cpu", "4:00:00")
        assert pair.environment == {"A": "1", "B": "2"}
        assert (train.partition, train.environment) == ("gpu", {"A": "1"})


def test_a_job_asks_for_what_resources_and_settings_say(store):
    request = probe_request(store, Resources(gpus=2, nodes=2, cpus=3.5, memory_gib=1.5))
    settings = SlurmSettings(partition="gpu", time_limit=90, sbatch_options=("--exclusive",))
    options = submit_options(request, Execution(slurm=settings))
    of_gpus = submit_options(probe_request(store, Resources(gpus=8)), Execution())
    assert "--cpus-per-task=8" in of_gpus, "one for each GPU's process"
    expected = {"--nodes=2", "--gres=gpu:2", "--cpus-per-task=4", "--mem=1536M", "--exclusive"}
    assert expected | {"--partition=gpu", "--time=90", "--signal=TERM@60"} <= set(options)
    assert {"--export=NONE", "--no-requeue"} <= set(options)
    plain = submit_options(probe_request(store), Execution())
    assert not [
        option for option in plain if option.split("=")[0] in ("--gres", "--mem", "--partition")
    ]


def program_of(request, folder, grace_seconds=30, **changes):
    return batch_program(
        request,
        Execution(slurm=SlurmSettings.model_validate(changes), grace_seconds=grace_seconds),
        "/store/a request.json",
        folder,
        "/venv/bin/python",
    )


def test_a_batch_program_is_shell_whatever_paths_and_values_hold(request_):
    text = program_of(
        request_,
        Path("/store/it's here"),
        environment={"NAME": "it's $HOME", "GOMP_SPINCOUNT": "7"},
        set_up=("module load cuda",),
        container="apptainer exec 'my image.sif'",
        srun_options=("--container-name=a b",),
    )
    done = run_program("bash", "-n", input=text)
    assert done.returncode == 0, done.stderr
    head = text[: text.index("# Batch program")]
    shown = 'printf "%s|" "$folder" "$NAME" "$GOMP_SPINCOUNT" "${first[@]}" "${srun_options[@]}"'
    script = head + f"module() {{ :; }}\nset_up\n{shown}\n"
    done = run_program("bash", input=script)
    words = done.stdout.split("|")
    assert words[:3] == ["/store/it's here", "it's $HOME", "7"], "the settings before the runner's"
    assert words[3:8] == [
        "/usr/bin/env",
        "CUDA_VISIBLE_DEVICES=",
        "apptainer",
        "exec",
        "my image.sif",
    ]
    assert words[-3:] == ["/store/a request.json", "--container-name=a b", ""]


def ended_gang(folder, request, first, other, grace_seconds):
    """End of a job of two nodes whose steps are pieces of shell, as its batch program tells it."""
    text = program_of(request, folder, grace_seconds=grace_seconds)
    # Slurm starts the steps; here this shell does.
    steps = f'srun() {{ case "$*" in *--relative=0*) {first};; *) {other};; esac; }}\n'
    environment = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "PATH": os.environ["PATH"]}
    done = run_program("bash", input=steps + text, env=environment)
    status = status_of(folder)
    assert status is not None, done.stderr
    return status, {"JobState": "FAILED"}


HANGS = "exec sleep 600"


@pytest.mark.parametrize(
    ("first", "other", "kind", "message"),
    [
        ("exit 1", "kill -KILL $BASHPID", StageFailedError, "another node's part ended by SIGKILL"),
        ("sleep 1; exit 1", "kill -SEGV $BASHPID", StageFailedError, "another .* by SIGSEGV"),
        ("exit 1", "exit 1", StageFailedError, "exit code 1"),
        ("kill -KILL $BASHPID", "exit 1", StageFailedError, "ended by SIGKILL"),
        # The first node is still saving.
        ("sleep 7; exit 143", "exit 143", PreemptedError, "was sent SIGTERM"),
        ("exit 1", HANGS, PreemptedError, "lost a node"),
        ("exit 137", HANGS, StageFailedError, "ended by SIGKILL"),
    ],
)
def test_an_end_of_two_nodes_is_explained_by_its_cause(store, first, other, kind, message):
    request = probe_request(store, Resources(nodes=2))
    end = ended_gang(store.root, request, first, other, grace_seconds=1 if other == HANGS else 30)
    with pytest.raises(kind, match=message) as caught:
        raise_end(end, request)
    assert type(caught.value) is kind


def test_a_job_whose_folder_is_gone_ends_its_stage(request_, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    commands = 'srun() { rm -r "$folder"; exec sleep 600; }\nscancel() { kill "$main"; }\n'
    text = program_of(request_, folder)
    environment = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "1", "PATH": os.environ["PATH"]}
    done = run_program("bash", input=commands + text, env=environment, timeout=60)
    assert done.returncode == EXIT_STOPPED, done.stderr


def test_a_job_is_found_by_its_name_for_its_key_alone(store, request_):
    name = work_name(request_)
    folder = jobs_folder(store) / name
    folder.mkdir(parents=True)
    assert folders_for(store, request_.key) == [folder]
    assert work_name(request_) != name
    assert folders_for(store, "0" * 64) == []
    assert shlex.quote(name) == name


def test_an_orchestrator_in_a_job_keeps_that_job_s_settings_back(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "c")
    kept = client.clean_environment()
    assert kept["SLURM_CONF"] == "c"
    assert "SLURM_JOB_ID" not in kept


def ending(code, state, reason="", **fields):
    values = {"code": code, "reason": reason}
    status = None if code is None else Status.model_validate(values)
    return status, {"JobState": state} | fields


def raise_end(end, request):
    ending = ending_of("12", *end, request.store)
    raise_for(ending, AttemptLog(Path("the.log"), io.StringIO()), request, stopped=False)


TAKEN_AT = {"PreemptTime": "2026-01-01T00:00:00"}


@pytest.mark.parametrize(
    ("end", "kind", "message"),
    [
        (ending(143, "FAILED", **TAKEN_AT), PreemptedError, "was preempted"),
        (ending(1, "FAILED", **TAKEN_AT), PreemptedError, "was preempted"),
        (ending(None, "PREEMPTED"), PreemptedError, "was preempted"),
        (ending(None, "NODE_FAIL"), PreemptedError, "lost a node"),
        (ending(None, "TIMEOUT", TimeLimit="00:01:00"), PreemptedError, "reached its time limit"),
        (ending(0, "NODE_FAIL"), PreemptedError, "lost a node"),
        (ending(143, "FAILED", PreemptTime="None"), PreemptedError, "was sent SIGTERM: by Slurm"),
        (ending(143, "CANCELLED"), RefusedError, "was cancelled"),
        (ending(None, "CANCELLED"), RefusedError, "was cancelled"),
        (ending(137, "OUT_OF_MEMORY"), StageFailedError, "resources.probe.memory_gib=None"),
        (ending(None, "FAILED"), StageFailedError, "does the node see the store"),
        (ending(None, ""), StageFailedError, "Slurm has forgotten it"),
        (ending(143, "FAILED", "node"), StageFailedError, "another node's part ended"),
        (ending(1, "FAILED"), StageFailedError, "exit code 1"),
    ],
    ids=str,
)
def test_each_end_of_a_job_has_its_error(end, kind, message, request_):
    with pytest.raises(kind, match=message) as caught:
        raise_end(end, request_)
    assert type(caught.value) is kind
    assert "the.log" in str(caught.value) or kind is RefusedError


def test_a_container_runs_its_own_python_unless_another_is_named(request_):
    slurm = SlurmSettings(container="apptainer exec geb.sif")
    assert default_interpreter(Execution(slurm=slurm), request_) == "python"
    named = Execution(slurm=slurm, interpreters={"probe": "/opt/geb/bin/python"})
    assert default_interpreter(named, request_) == "/opt/geb/bin/python"
    assert default_interpreter(Execution(), request_) == sys.executable


@pytest.mark.parametrize(
    ("complaint", "passes"),
    [
        ("QOSMaxSubmitJobPerUserLimit", True),
        ("Batch job submission failed: Unable to contact slurm controller", True),
        ("Batch job submission failed: Socket timed out on send/recv operation", True),
        ("slurm_receive_msg: Zero Bytes were transmitted or received", True),
        ("Slurm backup controller in standby mode", True),
        ("invalid partition specified: x", False),
        ("QOSMaxWallDurationPerJobLimit: violates policy (job submit limit, time limits)", False),
    ],
)
def test_a_full_queue_and_a_busy_controller_may_pass(complaint, passes):
    assert may_pass(f"sbatch: error: {complaint}") is passes


@pytest.mark.parametrize(
    ("reason", "hopeless"),
    [
        ("Resources", False),
        ("AssocGrpCPURunMinutesLimit", False),
        ("PartitionNodeLimit", False),
        ("ReqNodeNotAvail,_UnavailableNodes:launch01", False),
        ("launch_failed_requeued_held", True),
        ("InvalidQOS", True),
        ("QOSMaxCpuPerJobLimit", True),
    ],
)
def test_a_job_that_others_hold_back_waits(reason, hopeless):
    assert is_hopeless(reason) is hopeless


@pytest.mark.parametrize(("complaint", "forgotten"), [("Invalid job id", True), ("away", False)])
def test_a_controller_that_is_away_has_not_forgotten_a_job(
    tmp_path, monkeypatch, complaint, forgotten
):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho {complaint} >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if forgotten:
        assert client.details("12") == {}
    else:
        with pytest.raises(PlaceAwayError, match="away"):
            client.details("12")


def test_nodes_that_are_down_are_waited_for(request_, monkeypatch):
    refusal = "allocation failure: Requested node configuration is not available"
    refused = subprocess.CompletedProcess([], 1, "", refusal)
    monkeypatch.setattr(client, "submit", lambda options, script: refused)
    monkeypatch.setattr(client, "nodes_away", lambda partition: "node2")
    execution = Execution(slurm=SlurmSettings(sbatch_options=("--account=lab",)))
    check_job(request_, execution)
    monkeypatch.setattr(client, "nodes_away", lambda partition: "")
    message = r"configuration is not available \(sbatch .*--account=lab"
    with pytest.raises(UserError, match=message) as caught:
        check_job(request_, execution)
    assert "execution.slurm or resources.probe" in caught.value.remedy
