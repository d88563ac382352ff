"""Wrong changes to the wiring, one at a time: ``python scripts/wirings.py [NUMBER…]``.

``tests/wirings.toml`` lists them: a text of a file, what takes its place, and the tests that must
notice. Each is made in a copy of the project, in which these tests pass first. Prints a table; exit
code 1 if one goes unnoticed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = (
    "flows",
    "stages",
    "experiments",
    "examples",
    "tests",
    "configs",
    "data",
    "docs",
    "benchmarks",
)
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")


def main() -> int:
    """Makes each change, runs its tests, and prints which went unnoticed."""
    wirings = tomllib.loads((ROOT / "tests/wirings.toml").read_text(encoding="utf-8"))["wiring"]
    chosen = [int(number) for number in sys.argv[1:]] or range(1, len(wirings) + 1)
    unnoticed = 0
    passed: set[tuple[str, ...]] = set()
    with tempfile.TemporaryDirectory(prefix="geb-wirings-") as folder:
        copy = Path(folder)
        for part in PARTS:
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for name in FILES:
            shutil.copyfile(ROOT / name, copy / name)
        for environment in ROOT.glob(".venv*"):
            (copy / environment.name).symlink_to(environment)
        for number in chosen:
            wiring = wirings[number - 1]
            # Tests that fail anyhow, as without an environment, notice nothing.
            if (tests := tuple(wiring["tests"])) not in passed and fails(copy, *tests):
                sys.exit(f"{wiring['what']}: {', '.join(tests)} fail without the change")
            passed.add(tests)
            noticed = try_wiring(copy, **wiring)
            unnoticed += not noticed
            print(f"{number:3} {'noticed' if noticed else 'UNNOTICED':9} {wiring['what']}")
            sys.stdout.flush()
    print(f"{len(chosen) - unnoticed} of {len(chosen)} noticed")
    return 1 if unnoticed else 0


def try_wiring(copy: Path, what: str, file: str, old: str, new: str, tests: list[str]) -> bool:
    """True if a test fails once ``old`` stands as ``new``.

    Raises:
        SystemExit: The text is not in the file just once.
    """
    path = copy / file
    whole = path.read_text(encoding="utf-8")
    if whole.count(old) != 1:
        sys.exit(f"{what}: {file} has {old!r} {whole.count(old)} times, not once")
    path.write_text(whole.replace(old, new), encoding="utf-8")
    try:
        return fails(copy, *tests)
    finally:
        path.write_text(whole, encoding="utf-8")


def fails(copy: Path, *tests: str) -> bool:
    """True if one of these tests fails.

    Raises:
        SystemExit: They did not run.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"{', '.join(tests)} did not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
