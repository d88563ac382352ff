"""Rules for every stage: its folder, its parameters, its program."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from stages.contract.errors import EXIT_STOPPED
from stages.contract.params import Settings, StageParams
from stages.harness.program import Stage
from tests.programs import run_program
from tests.stages.contract.test_key import all_params

ROOT = Path(__file__).parents[2]
STAGES = sorted(path.parent.name for path in (ROOT / "stages").glob("*/__main__.py"))
PARAMS = {param.stage: param for param in all_params()}


def fields_of(model: type[BaseModel]) -> list[tuple[str, str | None]]:
    """Names and descriptions of all fields, also in nested groups."""
    rows: list[tuple[str, str | None]] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        rows.append((name, field.description))
        if isinstance(kind, type) and issubclass(kind, Settings):
            rows += fields_of(kind)
    return rows


def groups_of(model: type[BaseModel]) -> list[type]:
    """Classes that declare the fields of nested groups."""
    kinds = [field.annotation for field in model.model_fields.values()]
    groups = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)]
    return [base for group in groups for base in (*group.__mro__, *groups_of(group))]


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_has_its_folder_s_name_a_version_and_outputs(name):
    params = PARAMS[name]
    assert params.stage == name
    assert params.version
    assert params.outputs
    stage = importlib.import_module(f"stages.{name}.run").STAGE
    assert isinstance(stage, Stage)
    assert stage.params is params


@pytest.mark.parametrize("name", STAGES)
def test_every_field_is_described(name):
    bare = [field for field, description in fields_of(PARAMS[name]) if not description]
    assert bare == []


def read_as_a_whole(params: type[StageParams], source: str) -> set[str]:
    """Fields of groups that are passed on whole (`Group.model_fields`, `group.model_dump()`)."""
    classes = set(re.findall(r"(\w+)\.model_fields", source))
    attributes = set(re.findall(r"(\w+)\.model_dump\(", source))
    groups = [base for base in params.__mro__ if base.__name__ in classes]
    groups += [
        field.annotation
        for name, field in params.model_fields.items()
        if name in attributes and isinstance(field.annotation, type)
    ]
    return {
        field for group in groups if issubclass(group, Settings) for field in group.model_fields
    }


@pytest.mark.parametrize("name", STAGES)
def test_every_field_is_read(name):
    params = PARAMS[name]
    # Those that declare its fields: its own, and for some the engine's.
    declaring = [*params.__mro__, *groups_of(params)]
    rooms = {stage.__module__.split(".")[1] for stage in declaring if "stages." in stage.__module__}
    # Settings of a chat template are passed on to it.
    rooms.add("modeling")
    paths = [path for room in rooms for path in (ROOT / "stages" / room).glob("*.py")]
    source = "\n".join(path.read_text() for path in paths)
    flows = "\n".join(path.read_text() for path in (ROOT / "flows").rglob("*.py"))
    unread = [
        field
        for field, _ in fields_of(params)
        if not re.search(rf"\.{field}\b|[\"']{field}[\"']", source + flows)
    ]
    assert set(unread) - read_as_a_whole(params, source) == set()


def test_parameters_load_without_a_machine_learning_library():
    modules = ", ".join(f"stages.{name}.params" for name in STAGES)
    heavy = ("torch", "transformers", "prefect")
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = run_program(sys.executable, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_stage_tells_how_it_is_called():
    done = run_program(sys.executable, "-m", "stages.pair", "--help")
    assert done.returncode == 0
    assert "usage: python -m stages.pair [-h] REQUEST.json" in done.stdout


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
