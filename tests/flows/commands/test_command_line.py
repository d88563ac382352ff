"""The command line itself: help, version, completion, the list of fields, and its imports."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from flows.pipeline.fields import run_rows
from tests.flows.loop import geb, geb_json, geb_ok
from tests.forking import forked_python
from tests.programs import run_program


def test_alone_it_shows_its_help_and_with_version_its_version():
    alone = geb_ok()
    assert "Usage: geb" in alone.stdout
    assert "status" in alone.stdout
    assert alone.stderr == ""
    assert geb("--version").stdout.strip() == importlib.metadata.version("geb")


def test_a_shell_completes_commands():
    done = geb(_GEB_COMPLETE="complete_bash", COMP_WORDS="geb prom", COMP_CWORD="1")
    assert done.stdout.split() == ["promote"], done.stderr


def test_fields_of_a_section_have_default_and_meaning():
    fields = geb_json("fields", "train.kappa")
    assert all(name.startswith("train.kappa") for name in fields)
    assert fields["train.kappa"]["default"] is None
    assert "train.kappa" in geb("fields", "train.kappa").stdout


def test_a_field_without_a_default_is_required():
    fields = geb_json("fields", "execution.kubernetes")
    claim = fields["execution.kubernetes.volumes.NAME.claim"]
    assert claim == claim | {"required": True, "default": None}
    assert not fields["execution.kubernetes.namespace"]["required"]


@pytest.mark.parametrize("command", [("fields",), ("fields", "train", "--json")])
def test_output_for_which_the_disk_has_no_room_is_a_message(command):
    with Path("/dev/full").open("w") as full:
        words = [forked_python(), "-m", "flows.commands.cli", *command]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error a file or the output: No space left on device")
    assert "remedy make room" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_has_few_settings():
    """Each counts once: resources for all stages together, tables by name with their section."""
    names = [row.name for row in run_rows() if ".NAME." not in row.name]
    assert len(names) <= 300, f"{len(names)} settings: {' '.join(names)}"


HEAVY = ("torch", "transformers", "vllm", "deepspeed", "datasets")
SLOW = ("prefect", "scipy", "matplotlib")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [("flows.iterate, flows.pipeline.config", HEAVY), ("flows.commands.cli", (*HEAVY, *SLOW))],
    ids=["flow", "command line"],
)
def test_importing_loads_no_heavy_library(modules, unwanted):
    code = f"import sys, {modules}; print([name for name in {unwanted} if name in sys.modules])"
    assert run_program(sys.executable, "-c", code).stdout.strip() == "[]"
