"""Bad inputs to the command line, each of which must be refused with one message.

    python -m benchmarks.bad_inputs                  # --only TEXT: cases that have it, --json

Every setting gets values that its own declaration (`geb fields`) excludes; commands, oracles,
configuration files, data files and checkpoints get faults of people, programs and disks. A case is
right if the exit code is 64 within 30 s, and if one message of at most 4,000 characters names
value, place and remedy, without a traceback and, under `--json`, with nothing on stdout. `plan`
must refuse whatever it can see without a machine-learning library; the rest is refused by the stage
that reads it, in a real run. Some odd inputs must be accepted; the table lists why. `geb` and its
stages are forks of processes that have loaded their libraries. Exit code 1 if a case is wrong.
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
from benchmarks.bad_inputs.trial import Case, Outcome, geb, tried
from stages.contract.errors import EXIT_OK


def _cases(folder: Path, config: Path) -> Iterator[Case]:
    """All cases; their files are written into a folder."""
    places = {name: folder / name for name in ("settings", "data", "checkpoints")}
    for place in places.values():
        place.mkdir()
    return itertools.chain(
        settings.cases(places["settings"]),
        data_files.cases(places["data"], config),
        checkpoints.cases(places["checkpoints"], config),
    )


def _tell(outcome: Outcome) -> None:
    """Shows a wrong answer at once: all cases take minutes."""
    case = outcome.case
    sys.stderr.write(f"{case.kind}: {case.name[-200:]}: {', '.join(outcome.faults)}\n")
    sys.stderr.write(f"    {outcome.output[-300:]}\n")


def _show(outcomes: list[Outcome]) -> None:
    """Prints a row for each kind of input, and the inputs that are rightly accepted."""
    sys.stdout.write(
        "\n| kind | tried | by the plan or command | by plan or stage | accepted | wrong |\n"
    )
    sys.stdout.write("| --- | ---: | ---: | ---: | ---: | ---: |\n")
    for kind in dict.fromkeys(outcome.case.kind for outcome in outcomes):
        of_kind = [outcome for outcome in outcomes if outcome.case.kind == kind]
        right = Counter(outcome.case.by for outcome in of_kind if not outcome.faults)
        cells = [len(of_kind), right["itself"], right["run"], right[None]]
        cells.append(len(of_kind) - sum(right.values()))
        sys.stdout.write(f"| {kind} | {' | '.join(map(str, cells))} |\n")
    for case in (
        outcome.case for outcome in outcomes if outcome.case.by is None and not outcome.faults
    ):
        sys.stdout.write(f"accepted: {case.kind}, {case.name}: {case.why}\n")


def main() -> int:
    """Tries all cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose kind or name has this text")
    parser.add_argument("--json", action="store_true", help="all outcomes as JSON")
    options = parser.parse_args()
    with TemporaryDirectory() as name, prefect_server(Path(name)):
        os.chdir(name)
        config = write_small_run(Path(name))
        # It loads the libraries, too, and fills the store with what cases have in common.
        code, _, output = geb(["run", str(config)], limit_seconds=None)
        if code != EXIT_OK:
            raise SystemExit(f"a good run fails:\n{output}")
        cases = _cases(Path(name), config)
        chosen = (case for case in cases if options.only in f"{case.kind}: {case.name}")
        outcomes = []
        for case in chosen:
            outcomes.append(tried(case))
            if outcomes[-1].faults:
                _tell(outcomes[-1])
    wrong = [outcome for outcome in outcomes if outcome.faults]
    if options.json:
        sys.stdout.write(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
        return int(bool(wrong))
    _show(outcomes)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
