"""Campaign of faults: runs that are killed, stopped, cut off or damaged end as a calm one.

``python -m benchmarks.chaos --runs 20 --seed 0`` prints a line for each run: its runner and store,
its faults, how often it was resumed, and whether all artifacts equal the calm run's. Exit code
1 where one differs, a process outlives its orchestrator by ``--orphan-seconds``, or a command shows
a traceback. Such a run is kept; its last lines and the command that repeats it are printed.

With ``--out FILE`` each run adds a line of JSON there, and the same command goes on after the last
one. ``--table FILE`` prints the tables of such a file. As root the store is on a file system of its
own, which is filled and made read-only as well.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.chaos.campaign import Campaign
from benchmarks.chaos.outcome import append, read, table
from benchmarks.chaos.services import Services


def main() -> int:
    """Runs the campaign; 1 where a run did not end as the calm one, or left something behind."""
    options = _parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.table is not None:
        print(table(read(options.table)))
        return 0
    # The clusters of the tests, and no others.
    for variable in ("SLURM_CONF", "KUBECONFIG"):
        os.environ.pop(variable, None)
    numbers = range(options.runs) if options.only is None else [options.only]
    done = [] if options.out is None else read(options.out)
    outcomes = [
        outcome for outcome in done if outcome.seed == options.seed and outcome.run in numbers
    ]
    left = sorted(set(numbers) - {outcome.run for outcome in outcomes})
    printing = threading.Lock()

    with tempfile.TemporaryDirectory(prefix="geb-chaos-") as name:
        # Databases of servers that runs start themselves.
        os.environ["PREFECT_HOME"] = str(Path(name) / "own")
        with (
            Services(Path(name)) as services,
            ThreadPoolExecutor(options.parallel) as pool,
        ):
            campaign = Campaign(
                Path(name),
                services,
                seed=options.seed,
                faults=options.faults,
                orphan_seconds=options.orphan_seconds,
            )
            print(f"calm run: {len(campaign.expected)} steps, {campaign.seconds:.0f} s", flush=True)

            def run(number: int) -> None:
                outcome, kept = campaign.run(number)
                with printing:
                    print(outcome.line(), *kept, sep="\n", flush=True)
                    outcomes.append(outcome)
                    if options.out is not None:
                        append(options.out, outcome)

            try:
                list(pool.map(run, left))
            finally:
                # Ctrl-C and SIGTERM let the runs at work end: what they mounted and started goes.
                pool.shutdown(cancel_futures=True)
    bad = sorted(outcome.run for outcome in outcomes if not outcome.is_good)
    skipped = sum(bool(outcome.skipped) for outcome in outcomes)
    ran = len(outcomes) - skipped
    print(f"{ran - len(bad)} of {ran} runs ended as the calm one; {skipped} were skipped")
    for number in bad:
        print(
            f"not so seed {options.seed} run {number}; again: python -m benchmarks.chaos "
            f"--seed {options.seed} --only {number} --faults {options.faults} "
            f"--orphan-seconds {options.orphan_seconds:g}"
        )
    return 1 if bad else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=2, help="most faults in a run")
    parser.add_argument("--only", type=int, help="of the runs, the one of this number alone")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", type=Path, help="file of the runs that are done; goes on with it")
    parser.add_argument("--table", type=Path, help="print the tables of such a file, run nothing")
    parser.add_argument(
        "--orphan-seconds",
        type=float,
        default=10.0,
        help="time for a run's processes to end after their orchestrator",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
