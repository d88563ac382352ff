"""Table of a run of mutation testing, by file: ``python scripts/mutants.py [mutants]``.

Ends with 1 where fewer than 90 % of the mutants that were run are killed, or some were not run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

WANTED = 0.9
# Exit codes of the tests that mutmut keeps; every other one is a kill (a crash, a timeout).
_OUTCOMES = {None: "not run", 0: "survived", 33: "untested"}


def outcomes(folder: Path) -> dict[str, Counter[str]]:
    """Numbers of mutants by file, then by outcome.

    Args:
        folder: mutmut's folder, with a ``.meta`` file for each mutated one.
    """
    results = {}
    for path in sorted(folder.rglob("*.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"].values()
        if codes:
            name = path.relative_to(folder).with_suffix("").as_posix()
            results[name] = Counter(_OUTCOMES.get(code, "killed") for code in codes)
    return results


def killed_share(counts: Counter[str]) -> float | None:
    """Share of killed mutants among the mutants that were run; None without any."""
    run = counts.total() - counts["not run"]
    return counts["killed"] / run if run else None


def main(folder: Path) -> int:
    """Prints the table and returns the exit code."""
    results = outcomes(folder)
    whole = sum(results.values(), Counter[str]())
    columns = ("killed", "survived", "untested", "not run")
    width = max(map(len, results), default=0)
    print(f"{'':{width}}  mutants  {'  '.join(columns)}  killed %")
    for name, counts in [*results.items(), ("all", whole)]:
        numbers = "  ".join(f"{counts[column]:{len(column)}}" for column in columns)
        share = killed_share(counts)
        shown = "-" if share is None else f"{100 * share:.1f}"
        print(f"{name:{width}}  {counts.total():7}  {numbers}  {shown:>8}")
    share = killed_share(whole)
    if share is None:
        print(f"no mutant was run: {folder} holds no results; `make mutants` makes them")
        return 1
    if whole["not run"]:
        print(f"{whole['not run']} mutants were not run: `make mutants` goes on with them")
        return 1
    if share < WANTED:
        print(f"{100 * share:.1f} % are killed, and {100 * WANTED:g} % are wanted")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "mutants")))
