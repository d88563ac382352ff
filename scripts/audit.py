"""Known vulnerabilities of the packages that ``constraints/*.lock`` name, by pip-audit.

Exit code 0: none but the named exceptions. 1: some. 69: the data on some packages, which the
output names, cannot be had from here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints"
UNAVAILABLE = 69


def main() -> int:
    """Audits each lock; prints what was found and what could not be looked up."""
    exceptions = tomllib.loads((CONSTRAINTS / "audit.toml").read_text())["exceptions"]
    vulnerabilities: set[str] = set()
    unknown: set[str] = set()
    audited: set[str] = set()
    for lock in sorted(CONSTRAINTS.glob("*.lock")):
        for entry in _audit(lock, list(exceptions)):
            package = f"{entry['name']} {entry.get('version', '')}".strip()
            if "skip_reason" in entry:
                unknown.add(package)
                continue
            audited.add(package)
            for flaw in entry["vulns"]:
                mended = ", ".join(flaw["fix_versions"]) or "no version"
                vulnerabilities.add(f"{package} ({lock.name}): {flaw['id']}, mended in {mended}")
    for name, why in exceptions.items():
        print(f"exception {name}: {why}")
    for line in sorted(vulnerabilities):
        print(line)
    print(f"{len(audited)} packages audited, {len(vulnerabilities)} vulnerabilities")
    if vulnerabilities:
        return 1
    if unknown or not audited:
        some = ", ".join(sorted(unknown)[:5])
        print(
            f"no data for {len(unknown)} packages ({some}, …): run this where "
            "https://pypi.org/pypi/NAME/VERSION/json answers",
            file=sys.stderr,
        )
        return UNAVAILABLE
    return 0


def _audit(lock: Path, exceptions: list[str]) -> list[dict]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip_audit",
            "--disable-pip",
            "--require-hashes",
            "--requirement",
            str(lock),
            "--format",
            "json",
            "--progress-spinner",
            "off",
            *(part for exception in exceptions for part in ("--ignore-vuln", exception)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        # No answer at all: pip-audit tells the connection's error and ends.
        print(f"{lock.name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return []
    return json.loads(done.stdout)["dependencies"]


if __name__ == "__main__":
    sys.exit(main())
