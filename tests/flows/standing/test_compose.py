"""The image geb-flows and docker/compose.yaml, as far as no engine is needed."""

import re
import shutil
import sys

import yaml

from tests.flows.loop import ROOT
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
