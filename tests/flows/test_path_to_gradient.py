"""The files between `geb run` and `loss.backward()`, which docs/concepts.md lists in order."""

import re
from pathlib import Path

import pytest

from tests.flows.loop import ROOT, started, write_config

MOST_FILES = 14
# The objective's gradient notes the stack of the stage, and waits for the orchestrator's.
OBJECTIVE = """
import time, traceback
from pathlib import Path
import torch.nn.functional as F

def objective(chosen, rejected, folder):
    def on_gradient(gradient):
        frames = traceback.extract_stack()
        if any(frame.name == "backward" for frame in frames) and not Path(folder, "stage").exists():
            Path(folder, "stage").write_text("\\n".join(frame.filename for frame in frames))
            while not Path(folder, "orchestrator").exists():
                time.sleep(0.05)
    if chosen.logp.requires_grad:
        chosen.logp.register_hook(on_gradient)
    return {"loss": -F.logsigmoid(chosen.logratio - rejected.logratio)}
"""
PROGRAM = """
import sys, threading, time, traceback
from pathlib import Path
from flows.commands import cli

def watch(folder=Path(sys.argv.pop(1)), main=threading.get_ident()):
    while not (folder / "stage").exists():
        time.sleep(0.05)
    stacks = {number: traceback.extract_stack(top) for number, top in sys._current_frames().items()}
    # The main thread waits for the step's thread, which follows the stage.
    [following] = [
        stack for stack in stacks.values() if any(frame.name == "_follow" for frame in stack)
    ]
    frames = stacks[main] + following
    (folder / "orchestrator.tmp").write_text("\\n".join(frame.filename for frame in frames))
    (folder / "orchestrator.tmp").rename(folder / "orchestrator")

threading.Thread(target=watch, daemon=True).start()
cli.main()
"""


def files_on(stack):
    """Files of the project on a stack, each once, in the order of the calls."""
    paths = map(Path, stack.read_text().splitlines())
    return list(
        dict.fromkeys(
            str(path.relative_to(ROOT))
            for path in paths
            if path.is_relative_to(ROOT / "flows") or path.is_relative_to(ROOT / "stages")
        )
    )


@pytest.mark.slow
def test_the_page_lists_the_files_of_the_path(copied, tmp_path):
    (tmp_path / "objective.py").write_text(OBJECTIVE)
    (tmp_path / "program.py").write_text(PROGRAM)
    config = write_config(
        copied.parent,
        train={"objective": "python", "python": {"settings": {"folder": str(tmp_path)}}},
        inputs={"objective_code": str(tmp_path / "objective.py")},
        execution={"fork_server": False},
    )
    command = (str(tmp_path / "program.py"), str(tmp_path), "run", str(config))
    with started(*command, program=(), PYTHONPATH=str(ROOT)) as process:
        output = process.stdout
        while not (tmp_path / "orchestrator").exists():
            assert output.readline(), "the run ended before its first gradient"
    page = (ROOT / "docs/concepts.md").read_text()
    listed = re.findall(r"^\| \[[^]]*\]\(\.\./([^)]*)\)", page, re.MULTILINE)
    of_flows = [name for name in listed if name.startswith("flows/")]
    of_stage = [name for name in listed if name.startswith("stages/")]
    assert listed == of_flows + of_stage
    assert files_on(tmp_path / "orchestrator") == of_flows
    assert files_on(tmp_path / "stage") == of_stage
    assert len(listed) <= MOST_FILES
