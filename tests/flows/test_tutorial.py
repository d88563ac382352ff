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


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_tutorial_ends_with_a_promoted_model_and_holds_back_one_that_is_no_better(
    prefect_server: str, tmp_path: Path
) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "set -eux\n" + "".join(blocks("console"))
    environment = os.environ | {"PATH": path}
    done = run_program("bash", "-c", script, cwd=tmp_path, env=environment)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, said[-4000:]
    assert "desk@production is version 2" in said
    assert "train hardly moves the policy" in said
    assert "timid:1 is not promoted: better_than_base_confidence" in said
    desk = tmp_path / "desk"
    models = json.loads(run_program("geb", "models", "--json", cwd=desk, env=environment).stdout)
    assert models["desk"]["aliases"] == {"production": 2}
    assert models["timid"]["aliases"] == {}
    [code] = blocks("python")
    loaded = run_program(sys.executable, "-c", code, cwd=desk)
    assert loaded.stdout.startswith("Certainly, four maps for room 3.")
