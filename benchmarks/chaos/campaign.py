"""The calm run of a campaign, and its runs under faults."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.chaos.faults import FAULTS, mount
from benchmarks.chaos.launchers import Launcher, MissingError
from benchmarks.chaos.outcome import TOO_LATE, Outcome
from benchmarks.chaos.places import RUN, BucketPlace, FolderPlace, Place
from benchmarks.chaos.services import Services, bucket_environment
from benchmarks.chaos.trial import ROOT, Setting, Trial
from flows.pipeline.config import StageResources
from tests.object_storage import BUCKET, Gate

SMALL: dict[str, Any] = {
    "extends": str(ROOT / "configs/quickstart.yaml"),
    "name": RUN,
    "iterations": 1,
    "prepare": {"test_prompts": 16, "prompts_per_iteration": 48},
    "sft": {
        "architecture": {"hidden_size": 32, "intermediate_size": 64},
        "epochs": 1,
        "global_batch_rows": 128,
    },
    "train": {"checkpoint_every_steps": 1},
    "generate": {"chunk_responses": 16},
    "evaluation": {"num_samples": 2},
    "promote": {"better_than_base_confidence": None, "min_win_rate": None, "max_regression": None},
    "execution": {
        "retries": 0,
        "grace_seconds": 5,
        "sync_seconds": 2,
    },
    # The same number of threads everywhere gives the same bytes.
    "resources": {stage: {"cpus": 1} for stage in StageResources.model_fields},
}
# The runs take turns.
RUNNERS = ("process", "slurm", "kubernetes", "docker")
# A stage in a container, a pod or a job starts for longer than it computes.
_MOST_STEPS_ELSEWHERE = 3
_SLOWER_ELSEWHERE = 2.0
# Share of a calm run that goes by before its first step and after its last.
_SHARE_OF_START = 0.4
_DISK = "256m"
_MOST_ATTEMPTS = 6


class Campaign:
    """Runs under faults, and the calm run that they are compared with.

    Args:
        folder: Folder of its files.
        services: What the runs share.
        seed: Seed of all runs.
        faults: Most faults in a run.
        orphan_seconds: Time for processes to end after their orchestrator.

    Attributes:
        expected: Digest of each step's artifact.
        seconds: Time of the calm run.
    """

    def __init__(
        self, folder: Path, services: Services, *, seed: int, faults: int, orphan_seconds: float
    ) -> None:
        self._folder = folder
        self._seed = seed
        self._faults = faults
        self._orphan_seconds = orphan_seconds
        self._lock = threading.Lock()
        self._calm_bucket: BucketPlace | None = None
        self._services = services
        self._calm = FolderPlace(folder / "calm")
        started = time.monotonic()
        self._run_calmly(self._calm.location)
        self.seconds = time.monotonic() - started
        self.expected = self._calm.digests()

    def run(self, number: int) -> tuple[Outcome, list[str]]:
        """One run under faults; its outcome, and lines about it where it is not as it should be."""
        draw = random.Random(f"{self._seed}/{number}")
        runner = RUNNERS[number % len(RUNNERS)]
        setting = draw.choice(
            [
                Setting(runner),
                Setting(runner, server="own"),
                *([Setting(runner, store="bucket")] if runner == "process" else []),
            ]
        )
        try:
            with self._services.launchers.launcher(runner) as launcher:
                return self._run(number, setting, launcher, draw)
        except MissingError as error:
            return Outcome.of_no_run(self._seed, number, str(setting), str(error)), []

    def _run(
        self, number: int, setting: Setting, launcher: Launcher, draw: random.Random
    ) -> tuple[Outcome, list[str]]:
        with contextlib.ExitStack() as stack:
            folder = self._folder / f"run-{number:05d}"
            is_own = stack.enter_context(_disk(folder, may_mount=not launcher.is_cluster))
            trial = self._trial(stack, setting, folder, launcher, draw)
            steps = self._forget_some(trial)
            restarts = self._services.prefect.restarts
            started = time.monotonic()
            code = self._befall(trial, len(steps), is_own)
            while code and trial.attempts < _MOST_ATTEMPTS:
                code = trial.end(trial.start())
            seconds = time.monotonic() - started
            caused = sum(line.startswith("server restart") for line in trial.fault_lines)
            if self._services.prefect.restarts > restarts + caused and setting.server == "shared":
                trial.fault_lines.append("server restart of another run")
            outcome = Outcome(
                seed=self._seed,
                run=number,
                setting=str(setting),
                steps=len(steps),
                faults=tuple(trial.fault_lines),
                attempts=trial.attempts,
                seconds=round(seconds, 1),
                identical=code == 0 and trial.place.digests() == self.expected,
                orphans=trial.orphans,
                tracebacks=trial.tracebacks,
                repeated=trial.repeated,
            )
            if outcome.is_good:
                return outcome, []
            kept = Path(tempfile.mkdtemp(prefix="geb-chaos-failed-"))
            shutil.copytree(folder, kept / "run", symlinks=True)
            shutil.copy(trial.log, kept)
            return outcome, [f"  kept in {kept}; its last lines:", trial.last_lines()]

    def _befall(self, trial: Trial, steps: int, is_own_disk: bool) -> int:
        """Attempts under faults; returns the last one's exit code, 1 if a fault followed it."""
        draw = trial.draw
        code = 1
        names = [
            name
            for name, fault in sorted(FAULTS.items())
            if fault.befalls(trial.setting) and (is_own_disk or not fault.needs_root)
        ]
        share = _SHARE_OF_START + (1 - _SHARE_OF_START) * steps / len(self.expected)
        if trial.setting.runner != "process":
            share *= _SLOWER_ELSEWHERE
        for _ in range(draw.randint(1, self._faults)):
            name = draw.choice(names)
            fault = FAULTS[name]
            moment = draw.uniform(0.0, self.seconds * share)
            trial.fault_lines.append(f"{name}:" if fault.at_rest else f"{name}: at {moment:.0f} s")
            if fault.at_rest:
                fault.strike(trial)
                code = 1
                continue
            process = trial.start()
            try:
                process.wait(moment)
                trial.fault_lines[-1] += TOO_LATE
            except subprocess.TimeoutExpired:
                fault.strike(trial)
            if is_own_disk and fault.needs_root:
                # As long as it takes to be noticed.
                code = trial.end(process)
                _mend(trial.folder)
            else:
                code = trial.end(process)
        return code

    def _trial(
        self,
        stack: contextlib.ExitStack,
        setting: Setting,
        folder: Path,
        launcher: Launcher,
        draw: random.Random,
    ) -> Trial:
        gate = None
        place: Place
        environment: dict[str, str] = {}
        if setting.store == "bucket":
            calm = self._calm_in_a_bucket()
            gate = Gate(self._services.s3_port())
            stack.callback(gate.end)
            environment = bucket_environment(gate.port)
            place = calm.copy_to(f"s3://{BUCKET}/{folder.name}", folder)
        else:
            execution = {"runner": setting.runner} | launcher.settings(folder / "store")
            place = self._calm.copy_to(folder / "store", execution)
        return Trial(
            setting=setting,
            folder=folder,
            place=place,
            launcher=launcher,
            draw=draw,
            services=self._services,
            gate=gate,
            environment=environment,
            orphan_seconds=self._orphan_seconds,
        )

    def _forget_some(self, trial: Trial) -> list[str]:
        """Removes the artifacts of all steps from a random one on; returns the steps."""
        order = sorted(trial.place.records().items(), key=lambda each: each[1]["started"])
        most = len(order) if trial.setting.runner == "process" else _MOST_STEPS_ELSEWHERE
        gone = order[len(order) - trial.draw.randint(1, most) :]
        trial.place.forget((record["stage"], record["key"]) for _, record in gone)
        return [name for name, _ in gone]

    def _calm_in_a_bucket(self) -> BucketPlace:
        """The calm run again, in a bucket."""
        port = self._services.s3_port()
        with self._lock:
            if self._calm_bucket is None:
                place = BucketPlace(f"s3://{BUCKET}/calm", self._folder / "calm-hosts")
                cache = {"GEB_CACHE": str(self._folder / "calm-cache")}
                with self._services.prefect.undisturbed():
                    self._run_calmly(place.location, **bucket_environment(port), **cache)
                if place.digests() != self.expected:
                    sys.exit("the calm run in a bucket differs from the one in a folder")
                self._calm_bucket = place
            return self._calm_bucket

    def _run_calmly(self, store: str, **environment: str) -> None:
        config = self._folder / "chaos.yaml"
        config.write_text(yaml.safe_dump(SMALL | {"store": store}))
        done = subprocess.run(
            [sys.executable, "-m", "flows.commands.cli", "run", str(config)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | environment,
        )
        if done.returncode:
            sys.exit(f"the calm run failed:\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def _disk(folder: Path, *, may_mount: bool) -> Iterator[bool]:
    """A folder for one run; true if it is on a separate file system, which root can mount."""
    folder.mkdir()
    is_root = os.geteuid() == 0 and may_mount
    is_own = is_root and mount("-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder))
    try:
        yield is_own
    finally:
        if is_own:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder)


def _mend(folder: Path) -> None:
    mount("-o", "remount,rw", str(folder))
    (folder / "ballast").unlink(missing_ok=True)
