"""The image geb-flows and docker/compose.yaml, as far as no engine is needed."""

import os
import re
import shutil
import subprocess
import sys

import httpx
import pytest
import yaml

from flows.standing.server import free_port, is_prefect
from tests.flows.loop import ROOT
from tests.flows.probes import wait_until
from tests.programs import run_program

SERVICES = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]


def lay_out(folder):
    """Copies what .dockerignore lets through and the Dockerfile moves into geb-flows."""
    for line in (ROOT / ".dockerignore").read_text().split():
        if line.startswith("!"):
            shutil.copytree(ROOT / line[1:], folder / line[1:], symlinks=True, dirs_exist_ok=True)
            continue
        for path in folder.glob(line):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    [moved] = re.findall(r"mv (.+) /opt/flows", (ROOT / "docker/Dockerfile").read_text())
    assert {path.name for path in folder.iterdir()} - {"stages"} <= set(moved.split())


def test_the_files_of_the_image_run_a_flow(tmp_path):
    lay_out(tmp_path)
    program = "from flows.iterate import Preset; print(Preset.__metadata__[0])"
    done = run_program(
        *(sys.executable, "-P", "-c", program), cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
    )
    assert "quickstart" in done.stdout, done.stderr


def test_forms_offer_the_presets_of_the_worker():
    of_worker, of_form = (
        SERVICES[name]["environment"]["GEB_CONFIGS"] for name in ("worker", "deployments")
    )
    assert of_form == of_worker


def test_gpus_are_locked_where_the_image_lets_every_user_write():
    folder = SERVICES["worker"]["environment"]["GEB_GPU_LOCKS"]
    assert f"gpu-locks:{folder}" in SERVICES["worker"]["volumes"]
    assert f"mkdir -m 1777 -p {folder}\n" in (ROOT / "docker/Dockerfile").read_text()


@pytest.mark.slow
def test_the_server_serves_workers_and_no_page_of_another_site(tmp_path):
    server = SERVICES["server"]
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")
    command = [word.replace("0.0.0.0", host).replace("4200", port) for word in server["command"]]
    hosts = server["environment"]["GEB_ALLOWED_HOSTS"].replace("${GEB_ALLOWED_HOSTS:-}", "")
    variables = {"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": "", "GEB_ALLOWED_HOSTS": hosts}
    of_workers = SERVICES["worker"]["environment"]["PREFECT_API_URL"]
    name = of_workers.removeprefix("http://").removesuffix("/api")
    process = subprocess.Popen([sys.executable, *command[1:]], env=os.environ | variables)
    try:
        wait_until(lambda: is_prefect(f"http://{address}/api"))
        count = f"http://{address}/api/flows/count"
        assert httpx.post(count, json={}, headers={"Host": name}).is_success
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            assert httpx.post(count, json={}, headers=headers).status_code == 403
    finally:
        process.terminate()
        process.wait()
