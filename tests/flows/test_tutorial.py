"""docs/tutorial.md, command by command."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.flows.loop import ROOT
from tests.programs import run_program

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/tutorial.md").read_text()


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_tutorial_promotes_only_a_better_model(prefect_server, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "set -eux\n" + "".join(blocks("console"))
    environment = os.environ | {"PATH": path}
    done = run_program("bash", "-c", script, cwd=tmp_path, env=environment)
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, output[-4000:]
    assert "desk@production is version 2" in output
    assert "train hardly moves the policy" in output
    assert "timid:1 is not promoted: better_than_base_confidence" in output
    desk = tmp_path / "desk"
    models = json.loads(run_program("geb", "models", "--json", cwd=desk, env=environment).stdout)
    assert models["desk"]["aliases"] == {"production": 2}
    assert models["timid"]["aliases"] == {}
    [code] = blocks("python")
    loaded = run_program(sys.executable, "-c", code, cwd=desk)
    assert loaded.stdout.startswith("Sure, six pillows for room 12.")
