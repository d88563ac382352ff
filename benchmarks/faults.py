"""Faults of the campaign :mod:`benchmarks.chaos`, and the run that they befall."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
# Environment variable that all processes of a run inherit: victims and orphans are known by it.
_MARK = "GEB_CHAOS_RUN"
_KEPT_LINES = 60
_STOP_SECONDS = 5.0
_ATTEMPT_SECONDS = 900.0


@dataclass
class Trial:
    """One run under faults.

    Attributes:
        store: Its store.
        random: Draws victims and times.
        orphan_seconds: Time for its processes to end after their orchestrator.
        mark: Value of the environment variable of its processes.
        said: The faults.
    """

    store: Path
    random: random.Random
    orphan_seconds: float
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    said: list[str] = field(default_factory=list)
    attempts: int = 0
    tracebacks: int = 0
    orphans: int = 0

    def start(self) -> subprocess.Popen[bytes]:
        """Resumes the run; its output goes beside the store."""
        self.attempts += 1
        with self._log.open("ab") as file:
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
                # Forks of a fork server have a title in place of their environment.
                named = any(str(self.store) in part for part in each.cmdline())
                marked = named or each.environ().get(_MARK) == self.mark
                if marked and each.status() != "zombie":
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
        deadline = time.monotonic() + self.orphan_seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.orphans += len(left)
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        self.tracebacks = self._log.read_bytes().count(b"Traceback (most recent call last)")
        return code

    def last_lines(self) -> str:
        """The end of what the run's commands printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_KEPT_LINES:])

    @property
    def _log(self) -> Path:
        return self.store.parent / "output.log"


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
    """Fills the disk with a file ``ballast``, which the campaign removes again."""
    with contextlib.suppress(OSError), (trial.store.parent / "ballast").open("wb") as file:
        while True:
            file.write(b"\0" * (1 << 20))


def make_read_only(trial: Trial) -> None:
    """Makes the file system read-only, which Linux does by itself after errors of a disk."""
    if not mount("-o", "remount,ro", str(trial.store.parent)):
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


def mount(*arguments: str) -> bool:
    """Calls ``mount``; whether it succeeded."""
    done = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    return done.returncode == 0


def _role(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    for part, role in (
        ("flows.commands.cli", "orchestrator"),
        ("prefect", "server"),
        ("fork_server", "fork server"),
        ("supervisor", "supervisor"),
        (".worker", "worker"),
        ("-m stages.", "stage"),
    ):
        if part in command:
            return role
    return "helper"
