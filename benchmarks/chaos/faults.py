"""Faults that befall a run: of processes, of its disk, of the network to its bucket, of a server.

To add a fault: a function, and its row in :data:`FAULTS`.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from benchmarks.chaos.trial import Setting, Trial, role

_STOP_SECONDS = 5.0
# Shorter and longer than the patience of the store's client.
_CUT_SECONDS = (1.0, 8.0)


def kill(trial: Trial) -> None:
    """Kills one process of the run: orchestrator, server, supervisor, stage or worker."""
    if processes := trial.processes():
        victim = trial.draw.choice(processes)
        with contextlib.suppress(psutil.Error):
            trial.fault_lines[-1] += f" {role(victim)}"
            victim.kill()


def kill_all(trial: Trial) -> None:
    """Kills all processes at once, as the end of a host."""
    for process in trial.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()


def stop(trial: Trial) -> None:
    """Stops a process for a while."""
    if processes := trial.processes():
        victim = trial.draw.choice(processes)
        with contextlib.suppress(psutil.Error):
            trial.fault_lines[-1] += f" {role(victim)}"
            victim.suspend()
            time.sleep(_STOP_SECONDS)
            victim.resume()


def interrupt(trial: Trial) -> None:
    """Sends the orchestrator SIGTERM."""
    for process in trial.processes():
        with contextlib.suppress(psutil.Error):
            if role(process) == "orchestrator":
                process.send_signal(signal.SIGTERM)


def fill(trial: Trial) -> None:
    """Fills the disk with a file ``ballast``, which the campaign removes again."""
    with contextlib.suppress(OSError), (trial.folder / "ballast").open("wb") as file:
        while True:
            file.write(b"\0" * (1 << 20))


def make_read_only(trial: Trial) -> None:
    """Makes the file system read-only, which Linux does by itself after errors of a disk."""
    if not mount("-o", "remount,ro", str(trial.folder)):
        # The kernel waits for no file that is open for writing.
        trial.fault_lines[-1] += " (refused: files are open)"


def flip(trial: Trial) -> None:
    """Flips a bit in an artifact or in what an attempt left, and one in four times truncates it."""
    name = trial.place.damage(trial.draw)
    if not name:
        trial.fault_lines[-1] += " nothing is there"
        return
    parts = name.split("/")
    trial.damaged.add("/".join(parts[:3]))
    trial.fault_lines[-1] += f" {parts[0]}/{parts[-1]}"


def cut(trial: Trial) -> None:
    """Breaks the connections to the bucket, and new ones, for a while."""
    assert trial.gate is not None
    trial.gate.close()
    _wait(trial)
    trial.gate.open()


def lose(trial: Trial) -> None:
    """Loses all packets to and from the bucket for a while."""
    assert trial.gate is not None
    trial.gate.hold()
    _wait(trial)
    trial.gate.open()


def restart_server(trial: Trial) -> None:
    """Ends the Prefect server that the runs share, and starts it again."""
    trial.services.prefect.restart()


def _wait(trial: Trial) -> None:
    seconds = trial.draw.uniform(*_CUT_SECONDS)
    trial.fault_lines[-1] += f" for {seconds:.0f} s"
    time.sleep(seconds)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        strike: Does it.
        at_rest: Between attempts only: inputs are checked before a stage reads them, not while it
            does.
        needs_root: It takes a file system of the run's own.
        befalls: Says which runs it can befall.
    """

    strike: Callable[[Trial], None]
    at_rest: bool = False
    needs_root: bool = False
    befalls: Callable[[Setting], bool] = lambda setting: True


FAULTS: dict[str, Fault] = {
    "kill": Fault(kill),
    "kill all": Fault(kill_all),
    "stop": Fault(stop),
    "terminate": Fault(interrupt),
    "full disk": Fault(fill, needs_root=True),
    "read-only": Fault(make_read_only, needs_root=True),
    "flip": Fault(flip, at_rest=True),
    "bucket cut": Fault(cut, befalls=lambda setting: setting.store == "bucket"),
    "bucket silent": Fault(lose, befalls=lambda setting: setting.store == "bucket"),
    "server restart": Fault(restart_server, befalls=lambda setting: setting.server == "shared"),
}


def mount(*arguments: str) -> bool:
    """Calls ``mount``; whether it succeeded."""
    done = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    return done.returncode == 0
