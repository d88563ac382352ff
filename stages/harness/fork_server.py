"""Fork server: stages that start as forks of a process that has loaded their libraries.

A stage on a CPU spends seconds in importing torch and transformers, often longer than in its work.
``python -m stages.harness.fork_server`` imports them once, when a stage is first asked for, and
forks a supervisor and the stage below it for each start. All forks have the server's environment
variables and working folder.

The server's stdin is a socket of packets. Each packet asks for one start: the supervisor's command
line as a JSON array, with the descriptors of its stdin, stdout and stderr. That stdin is a socket:
the supervisor writes its process id there, as a line, and at its end its exit code, as another.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from argparse import Namespace
from typing import NoReturn

from stages.harness.supervisor import parse_options, supervise

_PACKET_BYTES = 1 << 16
_SUPERVISOR = "stages.harness.supervisor"
# Every stage imports it while it runs: pyarrow does, when pandas is installed.
_LATE_MODULES = ("pandas",)


def main() -> None:
    """Forks a supervisor and its stage for each packet, until the other end is closed."""
    requests = socket.socket(fileno=0)
    # The kernel takes ended forks away; nothing here asks for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        packet, streams, _, _ = socket.recv_fds(requests, _PACKET_BYTES, 3)
        if not packet:
            # A fork whose parent is gone would stand outside the orchestrator's tree of processes.
            with contextlib.suppress(ChildProcessError):
                os.wait()
            return
        # What libraries print as they are loaded, and this server's own errors.
        os.dup2(streams[2], 1)
        os.dup2(streams[2], 2)
        command = json.loads(packet)
        supervisor = parse_options(command[command.index(_SUPERVISOR) + 1 :])
        stage, _ = supervisor.command[-2:]
        _load(f"{stage}.run")
        if os.fork() == 0:
            _name_process(command)
            _supervise(supervisor, streams)
        for stream in streams:
            os.close(stream)


def _load(name: str) -> None:
    """Imports a stage's module and its late modules."""
    if name in sys.modules:
        return
    # The stage meets the same error when it imports the module itself, and tells it.
    with contextlib.suppress(Exception):
        stage = importlib.import_module(name).STAGE
        for module in (*_LATE_MODULES, *stage.params.late_modules):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module)
    # What stays in a buffer here is written by every fork.
    sys.stdout.flush()
    # Forks share the pages that the garbage collector does not write to.
    gc.collect()
    gc.freeze()


def _supervise(options: Namespace, streams: list[int]) -> NoReturn:
    """Does what ``python -m stages.harness.supervisor`` does, in the first fork."""
    os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    _tell(os.getpid())
    _tell(supervise(options, _run))
    os._exit(0)


def _tell(number: int) -> None:
    """Writes a number to the orchestrator, as a line."""
    # The orchestrator may be gone.
    with contextlib.suppress(BrokenPipeError):
        os.write(0, f"{number}\n".encode())


def _run(command: list[str]) -> NoReturn:
    """Does what ``python -m`` does with a stage, in the second fork."""
    _name_process(command)
    sys.argv = command[-2:]
    # `random` has another state in each fork, as in each process. NumPy's would be the server's.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    # A stage's program ends its process by itself.
    os._exit(1)


def _name_process(command: list[str]) -> None:
    """Shows the command line that `ps` would show had the program been started by itself."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("setproctitle").setproctitle(" ".join(command))


if __name__ == "__main__":
    main()
