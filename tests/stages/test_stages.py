"""Rules for every stage: its folder, its parameters, its program."""

import re
import sys
from pathlib import Path

import pytest

from stages.contract.errors import EXIT_STOPPED, EXIT_USER
from stages.contract.params import Settings
from tests.programs import run_program
from tests.stages.contract.test_key import all_params

ROOT = Path(__file__).parents[2]
STAGES = sorted(path.parent.name for path in (ROOT / "stages").glob("*/__main__.py"))
PARAMS = {param.stage: param for param in all_params()}


def fields_of(model):
    """Names and descriptions of all fields, also in nested groups."""
    rows = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        rows.append((name, field.description))
        if isinstance(kind, type) and issubclass(kind, Settings):
            rows += fields_of(kind)
    return rows


@pytest.mark.parametrize("name", STAGES)
def test_every_field_is_described(name):
    bare = [field for field, description in fields_of(PARAMS[name]) if not description]
    assert bare == []


@pytest.fixture(scope="module")
def source():
    """The code that may read parameters."""
    paths = [path for room in ("stages", "flows") for path in (ROOT / room).rglob("*.py")]
    return "\n".join(path.read_text() for path in paths if path.name != "params.py")


@pytest.mark.parametrize("name", STAGES)
def test_every_field_is_read(name, source):
    unread = [
        field
        for field, _ in fields_of(PARAMS[name])
        if not re.search(rf"\.{field}\b|[\"']{field}[\"']", source)
    ]
    assert unread == []


def test_parameters_load_without_a_machine_learning_library():
    modules = ", ".join(f"stages.{name}.params" for name in STAGES)
    heavy = ("torch", "transformers", "prefect")
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = run_program(sys.executable, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("arguments", [(), ("--help",), ("one.json", "two.json")])
def test_a_stage_tells_how_it_is_called(arguments):
    done = run_program(sys.executable, "-m", "stages.pair", *arguments)
    assert done.returncode == EXIT_USER
    assert "usage: python -m stages.pair REQUEST.json" in done.stdout


def test_further_sigterms_leave_the_end_of_a_stopped_program_alone():
    """Slurm, a supervisor and a node each send one, at once or when the program has saved."""
    code = """
import os, signal
from stages.contract.errors import StoppedError
from stages.harness import program

class Interrupted(program.Emitter):
    def emit(self, event):
        os.kill(os.getpid(), signal.SIGTERM)
        super().emit(event)

def work(events):
    with program.deferred_stop() as stop_requested:
        sender = os.fork()
        if sender == 0:
            for _ in range(5000):
                os.kill(os.getppid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(sender, 0)
        assert stop_requested()
    raise StoppedError("saved")

program.Emitter = Interrupted
program.run_program(work)
"""
    done = run_program(sys.executable, "-c", code, timeout=60)
    assert done.returncode == EXIT_STOPPED, done.stderr
    assert '"saved"' in done.stdout
