"""The Prefect server's password is in no job, pod or container, whatever the orchestrator has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.pipeline.kubernetes import KubernetesSettings
from flows.pipeline.placement import DockerSettings
from flows.pipeline.slurm import SlurmSettings
from flows.runners.base import supervised
from flows.runners.docker.options import container_options, host_options
from flows.runners.kubernetes.manifest import Attempt, attempt_name, pods_for
from flows.runners.slurm import client
from flows.runners.slurm.job import batch_program, health_program, submit_options
from stages.contract.local_store import LocalStore
from stages.contract.request import Request, Resources
from tests.probe_requests import probe_request

PASSWORD = "correct horse"
NAMES = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_KEY")


@pytest.fixture
def request_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Request:
    """A request for two nodes, made by an orchestrator that knows the password."""
    for name in NAMES:
        monkeypatch.setenv(name, f"admin:{PASSWORD}")
    return probe_request(LocalStore.open(str(tmp_path / "store"), create=True), Resources(nodes=2))


def is_clean(text: str) -> bool:
    return not [each for each in (PASSWORD, *NAMES) if each in text]


def test_no_pod_has_it(request_: Request) -> None:
    store = Path(request_.store)
    attempt = Attempt(
        name=attempt_name(request_, "abc123"),
        image="geb-core:1",
        uid=1000,
        gid=1000,
        request_path=str(store / "request.json"),
        sign=store / "orchestrators/key",
        grace_seconds=30,
        owner=None,
    )
    settings = KubernetesSettings.model_validate({"volumes": {request_.store: {"claim": "store"}}})
    pods = pods_for(request_, settings, attempt)
    assert len(pods) == 2
    assert is_clean(json.dumps(pods))


def test_no_container_has_it(request_: Request) -> None:
    made = container_options(
        request_,
        DockerSettings(),
        image="geb-core:1@sha256:1",
        user="1:1",
        command=supervised("python", 30, program=["stages.probe", "request.json"]),
        alive=Path(request_.store) / "containers/x",
    )
    assert is_clean(repr(made) + repr(host_options(request_, DockerSettings())))


def test_no_job_has_it(request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has sbatch, which `sbatch_options: [--export=ALL]` lets hand on its own environment."""
    settings = SlurmSettings(sbatch_options=("--export=ALL",))
    options = submit_options(request_, settings, grace_seconds=30)
    made = batch_program(
        request_,
        settings,
        request_file="request.json",
        folder=tmp_path,
        interpreter="python",
        grace_seconds=30,
    )
    tried = health_program(request_, settings, "python", request_.store, tmp_path)
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\nenv\necho "$@"\ncat\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=":")
    for script in (made, tried):
        done = client.submit(options, script)
        assert script in done.stdout
        assert "--export=ALL" in done.stdout
        assert f"PATH={sbatch.parent}" in done.stdout
        assert is_clean(done.stdout)
