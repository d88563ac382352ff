"""One run under faults: its commands, its processes, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.chaos.launchers import Launcher
from benchmarks.chaos.outcome import HANGS
from benchmarks.chaos.places import RUN, BucketPlace, Place
from benchmarks.chaos.services import Services
from stages.store.locks import EXPIRY_SECONDS
from tests.object_storage import Gate

ROOT = Path(__file__).parents[2]
# Environment variable that all processes of a run inherit: victims and orphans are known by it.
_MARK = "GEB_CHAOS_RUN"
_KEPT_LINES = 60
_ATTEMPT_SECONDS = 600.0


@dataclass(frozen=True)
class Setting:
    """Kind of a run.

    Attributes:
        runner: `execution.runner`.
        store: `folder`, or `bucket`, whose hosts begin without any local file half of the time.
        server: Prefect's: `shared` by the campaign, or the run's `own`.
    """

    runner: str
    store: str = "folder"
    server: str = "shared"

    def __str__(self) -> str:
        server = ", own server" if self.server == "own" else ""
        return f"{self.runner}, {self.store}{server}"


@dataclass
class Trial:
    """One run under faults.

    Attributes:
        setting: Its kind.
        folder: Folder of its files, on a separate file system as root.
        place: Its store.
        launcher: Where its stages start.
        draw: Draws victims and times.
        services: What it shares with others.
        gate: Its way to the bucket, if its store is in one.
        environment: Variables of its commands in addition to this process's.
        orphan_seconds: Time for its processes to end after their orchestrator.
        fault_lines: Its faults.
        mark: Value of the environment variable of its processes.
        damaged: Folders of artifacts, and of what attempts left, that faults have damaged.
        finished: Manifests of the artifacts that the present attempt found, by their names, without
            damaged ones.
    """

    setting: Setting
    folder: Path
    place: Place
    launcher: Launcher
    draw: random.Random
    services: Services
    gate: Gate | None
    environment: Mapping[str, str]
    orphan_seconds: float
    fault_lines: list[str] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    attempts: int = 0
    tracebacks: int = 0
    orphans: int = 0
    repeated: int = 0
    damaged: set[str] = field(default_factory=set)
    finished: dict[str, bytes] = field(default_factory=dict)

    def start(self) -> subprocess.Popen[bytes]:
        """Resumes the run; its output goes next to the store."""
        self.attempts += 1
        self.finished = {
            name: text
            for name, text in self.place.manifests().items()
            if name.rpartition("/")[0] not in self.damaged
        }
        environment = {**os.environ, **self.environment, _MARK: self.mark}
        if self.setting.server == "own":
            environment.pop("PREFECT_API_URL", None)
        if isinstance(self.place, BucketPlace):
            environment["GEB_CACHE"] = str(self._host())
        with self.services.prefect.undisturbed(), self.log.open("ab") as file:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "flows.commands.cli",
                    "resume",
                    RUN,
                    "--store",
                    self.place.location,
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """The run's living processes."""
        processes = []
        for process in psutil.process_iter():
            # It may end meanwhile.
            with contextlib.suppress(psutil.Error):
                # Forks of a fork server have a title in place of their environment.
                named = any(str(self.folder) in part for part in process.cmdline())
                marked = named or process.environ().get(_MARK) == self.mark
                if marked and process.status() != "zombie":
                    processes.append(process)
        return processes

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for the orchestrator and for what it started; counts what is wrong then.

        Half of the orchestrators that were killed leave their stages in a cluster to the next one,
        and the other half to the end of their sign of life.
        """
        try:
            code = process.wait(_ATTEMPT_SECONDS)
        except subprocess.TimeoutExpired:
            self.fault_lines.append(HANGS)
            process.kill()
            code = process.wait()
        self.tracebacks = self.log.read_bytes().count(b"Traceback (most recent call last)")
        seconds = self.orphan_seconds
        is_killed = code < 0 and self.launcher.is_cluster
        if is_killed:
            seconds += EXPIRY_SECONDS
        if not is_killed or self.draw.random() < 0.5:
            self._await_end(seconds)
        manifests = self.place.manifests()
        self.repeated += sum(manifests.get(name) != text for name, text in self.finished.items())
        return code

    def _await_end(self, seconds: float) -> None:
        """Waits for the end of the run's processes, jobs and pods; counts and kills the others."""
        deadline = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if left:
            self.orphans += len(left)
            self.fault_lines[-1] += f", ORPHANS: {', '.join(left)}"
        for orphan in self.processes():
            with contextlib.suppress(psutil.Error):
                orphan.kill()

    def _left(self) -> list[str]:
        processes = [role(process) for process in self.processes()]
        return processes or self.launcher.left(self.folder / "store")

    def last_lines(self) -> str:
        """The end of what the run's commands printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_KEPT_LINES:])

    def _host(self) -> Path:
        """The first host again, or one that has never seen the store."""
        assert isinstance(self.place, BucketPlace)
        if self.attempts > 1 and self.draw.random() < 0.5:
            return self.place.new_host()
        return self.folder / "first-host"

    @property
    def log(self) -> Path:
        """Log of its commands' output."""
        # Not where a full disk would keep it from being written.
        return self.folder.with_name(f"{self.folder.name}.log")


def role(process: psutil.Process) -> str:
    """Part of a process in its run."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return "ended"
    for part, name in (
        ("flows.commands.cli", "orchestrator"),
        ("prefect", "server"),
        ("fork_server", "fork server"),
        ("srun ", "srun"),
        ("supervisor", "supervisor"),
        ("-m stages.", "stage"),
    ):
        if part in command:
            return name
    return "helper"
