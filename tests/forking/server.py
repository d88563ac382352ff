"""Forks a process for each program that is asked for: ``python -m tests.forking.server SOCKET``.

The libraries are loaded when the first program is asked for. A fork of the server watches over each
program: it passes signals on, and kills the program, with all of its process group, when its asker
or this server's stdin is gone.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from functools import partial
from pathlib import Path

# Before any library is loaded that starts threads: what a fork must not inherit.
LOADED = {
    "stages": (
        "torch",
        "transformers",
        "transformers.models.llama.modeling_llama",
        "transformers.integrations.deepspeed",
        "pyarrow.parquet",
        "pandas",
        "deepspeed",
        # DeepSpeed's engine imports them when it starts, and they import all of torch's compiler.
        "deepspeed.ops.op_builder.all_ops",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "peft",
        "stages.generate.run",
        "stages.generate.transformers_backend",
        "stages.train.fit",
        "stages.sft.run",
        "stages.score.run",
        "stages.pair.run",
        "stages.evaluate.run",
        "stages.promote.run",
        "stages.prepare.run",
    ),
    "flows": (
        "prefect",
        "prefect.flow_engine",
        "prefect.task_engine",
        "flows.commands.cli",
        # Most commands import them late.
        "flows.report.comparison",
        "flows.report.html",
        "matplotlib.backends.backend_svg",
        "pandas",
        "pyarrow.dataset",
    ),
}
# What `geb run` sets before it loads Prefect, which reads it then.
SETTINGS = {"flows": {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}}


def main():
    """Prints a line once the server is ready, then forks for each request until stdin ends."""
    path = Path(sys.argv[1])
    settings = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                return
            connection, _ = listener.accept()
            if settings is None:
                settings = load(path.name)
                # From now on the kernel takes ended forks away.
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            if os.fork() == 0:
                listener.close()
                serve(connection, settings, str(path.parent / "python"))
                os._exit(0)
            connection.close()


def load(name):
    """Loads the libraries, and keeps the garbage collector off their pages.

    Returns:
        The environment variables that modules set when they are loaded.
    """
    before = dict(os.environ)
    os.environ.update(SETTINGS.get(name, {}))
    for module in LOADED[name]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    return {name: value for name, value in os.environ.items() if name not in before}


def serve(connection, settings, python):
    """Reads one request, forks, passes signals on, and tells how the fork ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    message = b""
    while len(message) < int.from_bytes(length, "big"):
        message += connection.recv(1 << 16)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        connection.close()
        become(json.loads(message), streams, settings, python)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(pid)
    watched = [ended, connection, 0]
    while ended not in (ready := select.select(watched, [], [])[0]):
        data = b"" if 0 in ready else connection.recv(64)
        for number in data or [signal.SIGKILL]:
            send_signal(pid, number)
        if not data:
            watched = [ended]
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(status.to_bytes(4, "big"))


def send_signal(pid, number):
    """Signals a fork's process group; it may not have made one yet."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


def become(request, streams, settings, python):
    """Takes the asker's place, in the forked process, and runs its program."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(settings | request["environment"])
    # As `python -m` does.
    sys.argv = [request["module"], *request["arguments"]]
    if request["is_safe"]:
        del sys.path[0]
    else:
        sys.path[0] = request["folder"]
    # A worker of a training looks whether the stage that started it is still there.
    os.getppid = lambda: request["parent"]
    # Programs that this one starts are forked as well.
    sys.executable = python
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        set_threads = partial(
            sys.modules["torch"].set_num_threads, int(os.environ["OMP_NUM_THREADS"])
        )
        set_threads()
        # A fork of this program rebuilds torch's pool at its first use, and two threads that
        # use it at once find none: "Invalid thread pool!".
        os.register_at_fork(after_in_child=set_threads)
    # `python -m` loads it as `__main__`.
    sys.modules.pop(request["module"], None)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
