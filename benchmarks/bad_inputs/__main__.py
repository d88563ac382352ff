"""Bad inputs to the command line, each of which must be refused with one message.

    python -m benchmarks.bad_inputs                  # --only TEXT: cases that have it, --json

Every setting gets values that its own declaration (`geb fields`) excludes, and commands, oracles
and files get mistakes that a person makes. A case is right if the exit code is 64, the message
names a remedy, no traceback is shown, and the message has at most 4,000 characters. Each case runs
in a fork of a process that has loaded the libraries. Exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bad_inputs import checkpoints, data_files, settings
from benchmarks.bad_inputs.small_run import prefect_server, write_small_run
from benchmarks.bad_inputs.trial import Case, Outcome, tried


def _cases(folder: Path) -> Iterator[Case]:
    """All cases; their files are written into a folder."""
    config = write_small_run(folder)
    places = {name: folder / name for name in ("settings", "data", "checkpoints")}
    for place in places.values():
        place.mkdir()
    return itertools.chain(
        settings.cases(places["settings"]),
        data_files.cases(places["data"], config),
        checkpoints.cases(places["checkpoints"], config),
    )


def _tell(outcome: Outcome) -> None:
    """Shows a wrong answer at once: all cases take half an hour."""
    case = outcome.case
    sys.stderr.write(f"{case.kind}: {case.name[-200:]}: {', '.join(outcome.faults)}\n")
    sys.stderr.write(f"    {outcome.output[-300:]}\n")


def main() -> int:
    """Tries all cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose kind or name has this text")
    parser.add_argument("--json", action="store_true", help="all outcomes as JSON")
    asked = parser.parse_args()
    with TemporaryDirectory() as name, prefect_server(Path(name)):
        os.chdir(name)
        chosen = (case for case in _cases(Path(name)) if asked.only in f"{case.kind}: {case.name}")
        outcomes = []
        for case in chosen:
            outcomes.append(tried(case))
            if outcomes[-1].faults:
                _tell(outcomes[-1])
    wrong = [each for each in outcomes if each.faults]
    if asked.json:
        sys.stdout.write(json.dumps([asdict(each) for each in outcomes], indent=1))
        return int(bool(wrong))
    counts = Counter(each.case.kind for each in outcomes)
    of_them_wrong = Counter(each.case.kind for each in wrong)
    sys.stdout.write("\n| kind | tried | wrong |\n| --- | ---: | ---: |\n")
    for kind, number in counts.items():
        sys.stdout.write(f"| {kind} | {number} | {of_them_wrong[kind]} |\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
