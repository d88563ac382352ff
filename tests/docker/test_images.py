"""Contents of the images; the compose file."""

import os
import shutil
import subprocess

import pytest
import yaml

from flows.runners.images import CODE_LABEL, image_tags
from stages.contract.manifest import stages_digest
from tests.flows.loop import ROOT
from tests.programs import lacking, run_program

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.release]

OF_STAGES = [image_tags(name, gpus=0)[0] for name in ("core", "torch", "vllm")]


def sh(engine, tag, script):
    """Output of a shell in an image, as the image's own user and without a network."""
    command = ["sh", "-c", script]
    output = engine.containers.run(
        tag, entrypoint=command, command=[], network_mode="none", read_only=True, remove=True
    )
    return str(output.decode())


@pytest.mark.parametrize("tag", OF_STAGES)
def test_an_image_holds_no_compiler_no_pip_and_does_not_run_as_root(images, engine, tag):
    assert sh(engine, tag, "id -u; id -g").split() == ["10001", "10001"]
    tools = sh(engine, tag, "command -v gcc cc g++ c++ make pip; ls -d /opt/* /wheels; true")
    assert tools.split() == ["/opt/code", "/opt/geb"]
    modules = sh(engine, tag, "cd /; python -c 'import sys, stages.pair.run; print(*sys.modules)'")
    assert "prefect" not in modules.split()


@pytest.mark.parametrize("tag", OF_STAGES)
def test_an_image_names_the_code_that_it_holds(images, engine, tag):
    assert engine.images.get(tag).labels[CODE_LABEL] == stages_digest()


def test_compose_and_the_cluster_have_the_same_deployments():
    commands = [["docker-compose"], ["docker", "compose"]]
    tools = [
        command
        for command in commands
        if shutil.which(command[0])
        and not subprocess.run([*command, "version"], capture_output=True, check=False).returncode
    ]
    if not tools:
        lacking("no compose is installed")
    settings = {
        "POSTGRES_PASSWORD": "a-password",
        "GEB_STORE": "/srv/geb/store",
        "GEB_INPUTS": "/opt/checkout",
        "DOCKER_GID": "998",
    }
    for command in tools:
        place = ROOT / "docker/compose.yaml"
        done = run_program(*command, "-f", place, "config", env=os.environ | settings)
        assert done.returncode == 0, done.stderr
        services = yaml.safe_load(done.stdout)["services"]
        assert set(services) == {"postgres", "redis", "server", "deployments", "worker"}
