"""Forks a process for each program that is asked for: ``python -m tests.forking.server SOCKET``.

The libraries are loaded when the first program is asked for. A program is killed, with all of its
process group, when its asker is gone; all programs are when this server's stdin ends.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
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


class Server:
    """Waits for requests and for the ends of the forks."""

    def __init__(self, path):
        self.modules = LOADED[path.name]
        self.settings = SETTINGS.get(path.name, {})
        self.python = str(path.parent / "python")
        self.loaded = False
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(0, selectors.EVENT_READ, self.end)
        self.forks = {}

    def serve(self):
        """Serves until stdin ends."""
        while True:
            for key, _ in self.selector.select():
                key.data(key.fileobj)

    def accept(self, listener):
        """Reads one request and forks."""
        connection, _ = listener.accept()
        length, streams, _, _ = socket.recv_fds(connection, 8, 3)
        message = b""
        while len(message) < int.from_bytes(length, "big"):
            message += connection.recv(1 << 16)
        if not self.loaded:
            self.load()
        pid = os.fork()
        if pid == 0:
            self.become(json.loads(message), streams)
        for stream in streams:
            os.close(stream)
        ended = os.pidfd_open(pid)
        self.forks[connection] = (pid, ended)
        self.selector.register(connection, selectors.EVENT_READ, self.hear)
        self.selector.register(ended, selectors.EVENT_READ, lambda _: self.reap(connection))

    def load(self):
        """Loads the libraries, and keeps the garbage collector off their pages."""
        before = dict(os.environ)
        os.environ.update(self.settings)
        for name in self.modules:
            importlib.import_module(name)
        # Modules set some when they are loaded.
        self.settings = {name: value for name, value in os.environ.items() if name not in before}
        gc.collect()
        gc.freeze()
        self.loaded = True

    def hear(self, connection):
        """Passes signals on; where the asker is gone, ends the fork and all it started."""
        if connection not in self.forks:
            return  # The same look has found the fork's end.
        pid, _ = self.forks[connection]
        data = connection.recv(64)
        for number in data or [signal.SIGKILL]:
            _signal(pid, number)
        if not data:
            self.selector.unregister(connection)

    def reap(self, connection):
        """Tells how a fork ended."""
        pid, ended = self.forks.pop(connection)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(status.to_bytes(4, "big"))
        connection.close()

    def end(self, stdin):
        """Ends with the test process."""
        for pid, _ in self.forks.values():
            _signal(pid, signal.SIGKILL)
        os._exit(0)

    def become(self, request, streams):
        """Takes the asker's place, in the forked process, and runs its program."""
        os.setsid()
        self.selector.close()
        self.listener.close()
        for connection, (_, ended) in self.forks.items():
            connection.close()
            os.close(ended)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(self.settings | request["environment"])
        # As `python -m` does.
        sys.argv = [request["module"], *request["arguments"]]
        if request["is_safe"]:
            del sys.path[0]
        else:
            sys.path[0] = request["folder"]
        # A worker of a training looks whether the stage that started it is still there.
        os.getppid = lambda: request["parent"]
        # Programs that this one starts are forked as well.
        sys.executable = self.python
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


def _signal(pid, number):
    """Signals a fork's process group; it may not have made one yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main():
    """Says that it is there, then serves."""
    server = Server(Path(sys.argv[1]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.serve()


if __name__ == "__main__":
    main()
