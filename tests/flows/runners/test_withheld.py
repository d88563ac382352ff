"""The Prefect server's password is in no job, pod or container, whatever the orchestrator has."""

import json
from pathlib import Path

import pytest

from flows.pipeline.placement import DockerSettings, Execution, KubernetesSettings, SlurmSettings
from flows.runners.command_lines import supervised
from flows.runners.docker.options import container_options
from flows.runners.kubernetes.manifest import PodGroup, pods_for
from flows.runners.slurm import client
from flows.runners.slurm.job import batch_program, submit_options
from stages.contract.request import Resources
from tests.flows.loop import write_program
from tests.probe_stage import probe_request

PASSWORD = "correct horse"
NAMES = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_KEY")


@pytest.fixture
def request_(store, monkeypatch):
    """A request for two nodes, made by an orchestrator that knows the password."""
    for name in NAMES:
        monkeypatch.setenv(name, f"admin:{PASSWORD}")
    return probe_request(store, Resources(nodes=2))


def is_clean(text):
    return not [secret for secret in (PASSWORD, *NAMES) if secret in text]


def test_no_pod_has_it(request_):
    store = Path(request_.store)
    settings = KubernetesSettings.model_validate({"volumes": {request_.store: {"claim": "store"}}})
    path = str(store / "request.json")
    execution = Execution(kubernetes=settings)
    pods = pods_for(PodGroup(request_, execution, "geb-x", (1000, 1000), path, request_.store, ""))
    assert len(pods) == 2
    assert is_clean(json.dumps(pods))


def test_no_container_has_it(request_, store):
    container = container_options(
        request_,
        store,
        DockerSettings(),
        image="geb-core:1@sha256:1",
        user="1:1",
        command=supervised("python", 30, program=["stages.probe", "request.json"]),
    )
    assert is_clean(repr(container))


def test_no_job_has_it(request_, tmp_path, monkeypatch):
    """Nor has sbatch, which `sbatch_options: [--export=ALL]` lets hand on its own environment."""
    execution = Execution(slurm=SlurmSettings(sbatch_options=("--export=ALL",)))
    options = submit_options(request_, execution)
    program = batch_program(request_, execution, "request.json", tmp_path, "python")
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    write_program(sbatch, 'env\necho "$@"\ncat')
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=":")
    done = client.submit(options, program)
    assert program in done.stdout
    assert "--export=ALL" in done.stdout
    assert f"PATH={sbatch.parent}" in done.stdout
    assert is_clean(done.stdout)
