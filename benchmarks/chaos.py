"""Campaign of faults: runs that are killed, stopped, starved of disk or damaged end as a calm one.

``python -m benchmarks.chaos --runs 20 --seed 0`` prints a line for each run: its faults, how often
it was resumed, and whether all artifacts are those of the calm run. Exit code 1 where one differs,
a process outlives its orchestrator by ``--orphan-seconds``, or a command shows a traceback. Such a
run is kept; its last lines and the command that repeats it are printed.

As root the store is on a file system of its own, which is filled and made read-only as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults import AT_REST, AT_WORK, NEEDS_ROOT, ROOT, Trial, mount
from stages.contract.errors import DamagedArtifactError
from stages.contract.local_store import LocalStore

SMALL: dict[str, Any] = {
    "extends": str(ROOT / "configs/quickstart.yaml"),
    "name": "chaos",
    "iterations": 1,
    "prepare": {"test_prompts": 16, "prompts_per_iteration": 48},
    "sft": {
        "architecture": {"hidden_size": 32, "intermediate_size": 64},
        "epochs": 1,
        "global_batch_rows": 128,
    },
    "train": {"checkpoint_every_steps": 1},
    "generate": {"chunk_prompts": 8},
    "evaluation": {"num_samples": 2},
    "promote": {"better_than_base_confidence": None, "min_win_rate": None, "no_regression": False},
    "execution": {"retries": 0, "grace_seconds": 5},
}
_DISK = "256m"
_MOST_ATTEMPTS = 6


def main() -> int:
    """Runs the campaign; 1 where a run did not end as the calm one, or left something behind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=2, help="most faults in a run")
    parser.add_argument("--only", type=int, help="of the runs, the one of this number alone")
    parser.add_argument(
        "--orphan-seconds",
        type=float,
        default=10.0,
        help="time for a run's processes to end after their orchestrator",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="geb-chaos-") as name:
        folder = Path(name)
        calm, seconds = _calm_run(folder)
        expected = digests(calm)
        print(f"calm run: {len(expected)} steps, {seconds:.0f} s", flush=True)
        numbers = range(options.runs) if options.only is None else [options.only]
        bad = [
            each for each in numbers if not _run_one(folder, calm, expected, seconds, each, options)
        ]
    print(f"{len(numbers) - len(bad)} of {len(numbers)} runs ended as the calm one")
    for number in bad:
        print(
            f"not so seed {options.seed} run {number}; again: python -m benchmarks.chaos "
            f"--seed {options.seed} --only {number} --faults {options.faults} "
            f"--orphan-seconds {options.orphan_seconds:g}"
        )
    return 1 if bad else 0


def _calm_run(folder: Path) -> tuple[Path, float]:
    """A store with an undisturbed run, and how long it took."""
    store = folder / "calm" / "store"
    config = folder / "chaos.yaml"
    config.write_text(yaml.safe_dump(SMALL | {"store": str(store)}))
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", "run", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"the calm run failed:\n{done.stdout}{done.stderr}")
    return store, time.monotonic() - started


def _run_one(
    folder: Path,
    calm: Path,
    expected: dict[str, str],
    seconds: float,
    number: int,
    options: argparse.Namespace,
) -> bool:
    draw = random.Random(f"{options.seed}/{number}")
    with _disk(folder / "disk") as (place, is_own):
        shutil.copytree(calm, place / "store", copy_function=shutil.copy2)
        trial = Trial(place / "store", draw, options.orphan_seconds)
        steps = _forget_some(trial.store, draw)
        share = len(steps) / len(expected)
        started = time.monotonic()
        faults = AT_WORK | AT_REST | (NEEDS_ROOT if is_own else {})
        for _ in range(draw.randint(1, options.faults)):
            name = draw.choice(sorted(faults))
            moment = draw.uniform(0.0, seconds * share)
            trial.said.append(f"{name} at {moment:.0f} s" if name not in AT_REST else name)
            if name in AT_REST:
                faults[name](trial)
                continue
            process = trial.start()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment)
            faults[name](trial)
            trial.end(process)
            if is_own:
                _mend(place)
        code = 1
        while code and trial.attempts < _MOST_ATTEMPTS:
            code = trial.end(trial.start())
        same = code == 0 and digests(trial.store) == expected
        good = same and not trial.orphans and not trial.tracebacks
        print(
            f"seed {options.seed} run {number}: {len(steps)} steps to do; {'; '.join(trial.said)}; "
            f"{trial.attempts} attempts, {time.monotonic() - started:.0f} s: "
            f"{'identical' if same else 'DIFFERS'}, {trial.orphans} orphans, "
            f"{trial.tracebacks} tracebacks",
            flush=True,
        )
        if not good:
            kept = Path(tempfile.mkdtemp(prefix="geb-chaos-failed-"))
            shutil.copytree(place, kept / "run", symlinks=True)
            print(f"  kept in {kept}; its last lines:\n{trial.last_lines()}", flush=True)
        return good


def _forget_some(store: Path, draw: random.Random) -> list[str]:
    """Removes the artifacts of all steps from a random one on; returns the steps."""
    order = sorted(records(store).items(), key=lambda each: each[1]["started"])
    first = draw.randrange(len(order))
    for _, record in order[first:]:
        shutil.rmtree(store / "artifacts" / record["stage"] / record["key"], ignore_errors=True)
    return [name for name, _ in order[first:]]


def records(store: Path) -> dict[str, dict[str, Any]]:
    """The run's records of steps by name."""
    found = [json.loads(path.read_text()) for path in (store / "runs/chaos/steps").glob("*.json")]
    return {each["step"]: each for each in found}


def digests(store: Path) -> dict[str, str]:
    """Digests of every step's artifact as its files are now, telemetry left out."""
    opened = LocalStore.open(str(store))
    found = {}
    for name, record in records(store).items():
        try:
            artifact = opened.load(record["stage"], record["key"])
            if artifact is not None:
                opened.verify(artifact)
                found[name] = artifact.manifest.digest()
        except DamagedArtifactError as error:
            # A finding of the campaign, not its end.
            found[name] = str(error)
    return found


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[tuple[Path, bool]]:
    """A folder for one run, on a file system of its own where that can be mounted."""
    place.mkdir()
    is_own = os.geteuid() == 0 and mount("-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(place))
    try:
        yield place, is_own
    finally:
        if is_own:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(place)


def _mend(place: Path) -> None:
    mount("-o", "remount,rw", str(place))
    (place / "ballast").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
