"""Fork server: stages that start as forks of a process that has loaded their libraries.

A stage on a CPU spends seconds in importing torch and transformers, often longer than in its work.
``python -m stages.contract.fork_server`` imports them once, when a stage is first asked for, and
forks a supervisor and the stage below it for each start. All forks have the server's environment
variables and working folder.

The server's stdin is a socket of packets. Each packet asks for one start: a JSON object
``{"program": [MODULE, ARGUMENT…], "grace_seconds": SECONDS, "left_log": FILE, "reader": PID}`` (see
``stages.contract.supervisor``) with four descriptors: stdin, stdout
and stderr of the supervisor, and a socket on which the supervisor writes its process id and, as
its last act, its exit code, each as four bytes. When its stdin ends, the server waits for
its forks, whose own stdin tells them when to end, and ends as well.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from stages.contract.supervisor import LeftOutput, die_with_parent, supervise

PACKET_BYTES = 1 << 16
"""Largest packet."""
NUM_DESCRIPTORS = 4
_LATE_MODULES = ("pandas",)
"""Modules that every stage imports while it runs: pyarrow does, where pandas is installed."""
INTEGER_BYTES = 4
"""Length of a process id or an exit code on the socket of a start."""


def serve(requests: socket.socket) -> None:
    """Forks a supervisor and its stage for each packet, until the other end is closed."""
    # The kernel takes ended forks away; nobody here asks for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        packet, descriptors, _, _ = socket.recv_fds(requests, PACKET_BYTES, NUM_DESCRIPTORS)
        if not packet:
            # A fork whose parent is gone would stand outside the orchestrator's tree of processes.
            with contextlib.suppress(ChildProcessError):
                os.wait()
            return
        order = json.loads(packet)
        _load(order["program"][0], errors=descriptors[2])
        try:
            pid = os.fork()
        except OSError as error:
            # The start fails with this as its last line, and may be tried again.
            os.write(descriptors[2], f"the fork server cannot fork: {error}\n".encode())
        else:
            if pid == 0:
                requests.close()
                _run(order, *descriptors)
        for each in descriptors:
            os.close(each)


def _load(program: str, *, errors: int) -> None:
    """Imports a stage's modules; what they print goes to the stage's own log."""
    name = f"{program}.run"
    if name in sys.modules:
        return
    os.dup2(errors, 2)
    # The stage meets the same error when it imports the module itself, and tells it. Its stdout is
    # for events, and whatever stays in a buffer here is written by every fork.
    with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
        stage = importlib.import_module(name).STAGE
        for each in (*_LATE_MODULES, *stage.params.late_modules):
            if importlib.util.find_spec(each.partition(".")[0]):
                importlib.import_module(each)
    _silence()
    # Forks share the pages that the garbage collector does not write to.
    gc.collect()
    gc.freeze()


def _run(order: dict[str, Any], *descriptors: int) -> NoReturn:
    """Supervises the stage, in the first fork."""
    program, grace_seconds = order["program"], order["grace_seconds"]
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, each in enumerate(descriptors[:3]):
        os.dup2(each, target)
        os.close(each)
    answers = descriptors[3]
    _name_process(f"stages.contract.supervisor --grace {grace_seconds}", program)
    os.write(answers, os.getpid().to_bytes(INTEGER_BYTES, "big"))
    left = LeftOutput(Path(order["left_log"]), order["reader"])
    code = supervise(lambda: _Fork(program, answers), grace_seconds, left=left)
    os.write(answers, code.to_bytes(INTEGER_BYTES, "big"))
    os._exit(0)


class _Fork:
    """The stage, a fork of its supervisor.

    Args:
        program: Module and arguments.
        answers: The supervisor's descriptor that the stage must not keep open.
    """

    def __init__(self, program: list[str], answers: int) -> None:
        can_be_signalled, ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(can_be_signalled)
            os.close(answers)
            _become(program, ready)
        os.close(ready)
        os.read(can_be_signalled, 1)
        os.close(can_be_signalled)

    def wait(self) -> int:
        """Waits for the stage's end: its exit code, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _become(program: list[str], ready: int) -> NoReturn:
    """Runs a program as ``python -m`` does, in this process."""
    os.setsid()
    die_with_parent()
    # The supervisor's handlers are not the stage's.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.close(ready)
    _name_process("", program)
    sys.argv = list(program)
    try:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def _name_process(parent: str, program: list[str]) -> None:
    """Shows the command line that `ps` would show had the program been started by itself."""
    words = [parent, "--", *program] if parent else program
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("setproctitle").setproctitle(
            " ".join((sys.executable, "-m", *words))
        )


def _silence() -> None:
    """Points stderr to nowhere: a start's log must not stay open in the server."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)


def main() -> None:
    """Serves on stdin."""
    requests = socket.socket(fileno=os.dup(0))
    _silence()
    serve(requests)


if __name__ == "__main__":
    main()
