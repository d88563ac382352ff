"""Campaign of faults: runs that are killed, stopped, starved of disk or damaged end as a calm one.

``python -m benchmarks.chaos --runs 20 --seed 0`` prints a line for each run: its faults, how often
it was resumed, and whether all artifacts are those of the calm run. Exit code 1 where one differs,
a process outlives its orchestrator by ten seconds, or a command shows a traceback.

As root the store is on a file system of its own, which is filled and made read-only as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from stages.contract.errors import DamagedArtifactError
from stages.contract.local_store import LocalStore

ROOT = Path(__file__).parents[1]
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
# Environment variable that all processes of a run inherit: victims and orphans are known by it.
_MARK = "GEB_CHAOS_RUN"
_ORPHAN_SECONDS = 10.0
_STOP_SECONDS = 5.0
_DISK = "256m"
_MOST_ATTEMPTS = 6
_ATTEMPT_SECONDS = 900.0


@dataclass
class Trial:
    """One run under faults.

    Attributes:
        store: Its store.
        random: Draws victims and times.
        mark: Value of the environment variable of its processes.
        said: The faults.
    """

    store: Path
    random: random.Random
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    said: list[str] = field(default_factory=list)
    attempts: int = 0
    tracebacks: int = 0
    orphans: int = 0

    def start(self) -> subprocess.Popen[bytes]:
        """Resumes the run; its output goes beside the store."""
        self.attempts += 1
        log = self.store.parent / "output.log"
        with log.open("ab") as file:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "flows.commands.cli", "resume", "chaos"),
                    *("--store", str(self.store)),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {_MARK: self.mark},
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """The run's living processes."""
        found = []
        for each in psutil.process_iter():
            # It may end meanwhile.
            with contextlib.suppress(psutil.Error):
                if each.environ().get(_MARK) == self.mark and each.status() != "zombie":
                    found.append(each)
        return found

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for the orchestrator and for what it started; counts orphans and tracebacks."""
        try:
            code = process.wait(_ATTEMPT_SECONDS)
        except subprocess.TimeoutExpired:
            self.said.append("HANGS")
            process.kill()
            code = process.wait()
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.orphans += len(left)
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        log = self.store.parent / "output.log"
        self.tracebacks = log.read_bytes().count(b"Traceback (most recent call last)")
        return code


def kill(trial: Trial) -> None:
    """Kills one process of the run: orchestrator, server, supervisor, stage or worker."""
    if found := trial.processes():
        victim = trial.random.choice(found)
        with contextlib.suppress(psutil.Error):
            trial.said[-1] += f" {_role(victim)}"
            victim.kill()


def kill_all(trial: Trial) -> None:
    """Kills all processes at once, as the end of a host."""
    for each in trial.processes():
        with contextlib.suppress(psutil.Error):
            each.kill()


def stop(trial: Trial) -> None:
    """Stops a process for a while."""
    if found := trial.processes():
        victim = trial.random.choice(found)
        with contextlib.suppress(psutil.Error):
            trial.said[-1] += f" {_role(victim)}"
            victim.suspend()
            time.sleep(_STOP_SECONDS)
            victim.resume()


def interrupt(trial: Trial) -> None:
    """Sends the orchestrator SIGTERM."""
    for each in trial.processes():
        with contextlib.suppress(psutil.Error):
            if _role(each) == "orchestrator":
                each.send_signal(signal.SIGTERM)


def fill(trial: Trial) -> None:
    """Fills the disk; :func:`_mend` makes room again."""
    with contextlib.suppress(OSError), (trial.store.parent / "ballast").open("wb") as file:
        while True:
            file.write(b"\0" * (1 << 20))


def make_read_only(trial: Trial) -> None:
    """Makes the file system read-only, which Linux does by itself after errors of a disk."""
    if not _mount("-o", "remount,ro", str(trial.store.parent)):
        # The kernel waits for no file that is open for writing.
        trial.said[-1] += " (refused: files are open)"


def flip(trial: Trial) -> None:
    """Flips a bit in an artifact or in what an attempt left, and one in four times truncates it."""
    files = [
        path
        for folder in ("artifacts", "work")
        for path in sorted((trial.store / folder).rglob("*"))
        if path.is_file() and path.stat().st_size
    ]
    if not files:
        trial.said[-1] += " (nothing is there)"
        return
    path = trial.random.choice(files)
    data = bytearray(path.read_bytes())
    if trial.random.random() < 0.25:
        del data[len(data) // 2 :]
    else:
        data[trial.random.randrange(len(data))] ^= 1 << trial.random.randrange(8)
    path.write_bytes(data)
    trial.said[-1] += f" {path.relative_to(trial.store).parts[0]}/{path.name}"


Fault = Callable[[Trial], None]
AT_WORK: dict[str, Fault] = {
    "kill": kill,
    "kill all": kill_all,
    "stop": stop,
    "terminate": interrupt,
}
NEEDS_ROOT: dict[str, Fault] = {"full disk": fill, "read-only": make_read_only}
# Between attempts only: inputs are checked before a stage reads them, not while it does.
AT_REST: dict[str, Fault] = {"flip": flip}


def main() -> int:
    """Runs the campaign; 1 where a run did not end as the calm one, or left something behind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=2, help="most faults in a run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="geb-chaos-") as name:
        folder = Path(name)
        calm, seconds = _calm_run(folder)
        expected = digests(calm)
        print(f"calm run: {len(expected)} steps, {seconds:.0f} s", flush=True)
        good = [
            _run_one(folder, calm, expected, seconds, options.seed, number, options.faults)
            for number in range(options.runs)
        ]
    print(f"{sum(good)} of {len(good)} runs ended as the calm one")
    return 0 if all(good) else 1


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
    seed: int,
    number: int,
    most_faults: int,
) -> bool:
    draw = random.Random(f"{seed}/{number}")
    with _disk(folder / "disk") as (place, is_own):
        shutil.copytree(calm, place / "store", copy_function=shutil.copy2)
        trial = Trial(place / "store", draw)
        steps = _forget_some(trial.store, draw)
        share = len(steps) / len(expected)
        started = time.monotonic()
        faults = AT_WORK | AT_REST | (NEEDS_ROOT if is_own else {})
        for _ in range(draw.randint(1, most_faults)):
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
            f"seed {seed} run {number}: {len(steps)} steps to do; {'; '.join(trial.said)}; "
            f"{trial.attempts} attempts, {time.monotonic() - started:.0f} s: "
            f"{'identical' if same else 'DIFFERS'}, {trial.orphans} orphans, "
            f"{trial.tracebacks} tracebacks",
            flush=True,
        )
        if not good:
            kept = Path(tempfile.mkdtemp(prefix="geb-chaos-failed-"))
            shutil.copytree(place, kept / "run", symlinks=True)
            print(f"  kept in {kept}")
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


def _role(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    for part, role in (
        ("flows.commands.cli", "orchestrator"),
        ("prefect", "server"),
        ("supervisor", "supervisor"),
        (".worker", "worker"),
        ("-m stages.", "stage"),
    ):
        if part in command:
            return role
    return "helper"


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[tuple[Path, bool]]:
    """A folder for one run, on a file system of its own where that can be mounted."""
    place.mkdir()
    is_own = os.geteuid() == 0 and _mount("-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(place))
    try:
        yield place, is_own
    finally:
        if is_own:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(place)


def _mend(place: Path) -> None:
    _mount("-o", "remount,rw", str(place))
    (place / "ballast").unlink(missing_ok=True)


def _mount(*arguments: str) -> bool:
    done = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
